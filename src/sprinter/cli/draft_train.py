"""``sprinter draft train``: trains heads on the target that draft, on texts that it writes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from sprinter.cli.draft_common import load_target, on_states, on_texts, on_training, trains, writes
from sprinter.cli.loading import Loading, loads
from sprinter.cli.options import ON_TARGET, DataOption, JsonOption, MoreOption, PlacingOptions, RestartOption
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option, stated_in, takes
from sprinter.training.drafts.settings import HeadSettings, TextSettings, TrainingSettings

__all__ = ["command"]

_TRAINING = [
    name for name in stated_in(TrainingSettings)
    if name not in ("decay", "freeze_embeddings", "on_policy", "gamma")
]  # fmt: skip


@loads(*ON_TARGET)
@writes()
@trains(*_TRAINING, loss="ce+kl", warm_up=0.0)
@takes("shape", HeadSettings, without=("seed",))
@takes("placing", PlacingOptions)
def command(
    data: DataOption,
    out: Annotated[Path, option("Folder of the heads.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    shape: HeadSettings = HeadSettings(),
    placing: PlacingOptions = PlacingOptions(),
    training: TrainingSettings = TrainingSettings(),
    texts: TextSettings = TextSettings(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Train heads on the target that draft in place of a draft model: it writes texts, and the heads learn its laws.

    To continue a run that was interrupted, give the same command again. Load them with --head.
    """
    from sprinter.training.drafts.heads import train_heads

    texts, shape = replace(texts, seed=training.seed), replace(shape, seed=training.seed)
    placing.check(loading)
    pair, weights = load_target(loading)
    facts = train_heads(
        pair, weights, [*data, *(more or ())], out, texts, shape, training, restart=restart, **asdict(placing),
        on_texts=on_texts, on_states=on_states, on_training=on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    rows = (
        [str(number), *(f"{value:.3f}" for value in row[:5])]
        for number, row in enumerate(facts["heads"]["accuracies"], 1)
    )
    title = f"rank of the target's token, {facts['heads']['accuracies_on']} texts"
    print_table(("head", "1st", "2nd", "3rd", "4th", "5th"), rows, title=title, left=0)
    for task, row in facts["tasks"].items():
        console().print(
            f"{task}: {row['chain_tokens_per_call']:.2f} tokens a target call as a chain, "
            f"{row['tree_tokens_per_call']:.2f} as a tree"
        )
    console().print(
        f"{facts['heads']['parameters']:,} parameters, trained in {facts['training']['seconds']:.0f} s; saved in {out}"
    )
