"""``sprinter draft train``: trains heads on the target that draft, on texts that it writes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from sprinter.cli.draft_common import load_target, on_states, on_texts, on_training
from sprinter.cli.loading import Loading, loads
from sprinter.cli.options import (
    ON_TARGET,
    DataOption,
    JsonOption,
    MoreOption,
    PlacingOptions,
    RestartOption,
    TextOptions,
    TrainingOptions,
)
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option, takes

__all__ = ["command"]


@loads(*ON_TARGET)
@takes("texts", TextOptions)
@takes("training", TrainingOptions)
@takes("placing", PlacingOptions)
def command(
    data: DataOption,
    out: Annotated[Path, option("Folder of the heads.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    kind: Annotated[
        Literal["medusa", "eagle", "eagle3", "glide"],
        option("What is trained; 'eagle' is the head of EAGLE and EAGLE-2."),
    ] = "medusa",
    heads: Annotated[
        int | None,
        option(
            "Medusa's heads, tokens ahead that are drafted; the others: steps of training.",
            default="4; eagle: 1",
        ),
    ] = None,
    blocks: Annotated[int, option("Residual blocks of each of Medusa's heads.")] = 1,
    share_output: Annotated[
        bool,
        option(
            "All of Medusa's heads end in the target's output layer: far fewer parameters.", "--share-output"
        ),
    ] = False,
    discount: Annotated[float, option("Weight of each further head's loss, relative to the last.")] = 0.8,
    regression: Annotated[
        float, option("Weight of EAGLE's loss of states, relative to that of laws.")
    ] = 10.0,
    vocabulary: Annotated[
        int | None, option("Tokens that EAGLE-3 can draft, the most frequent of the texts.", default="all")
    ] = None,
    keep_states: Annotated[
        bool, option("Keep the target's states on disk; else compute them in every epoch.")
    ] = True,
    placing: PlacingOptions = PlacingOptions(),
    training: TrainingOptions = TrainingOptions(),
    texts: TextOptions = TextOptions(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Train heads on the target that draft in place of a draft model: it writes texts, and the heads learn its laws.

    To continue a run that was interrupted, give the same command again. Load them with --head.
    """
    from sprinter.training.drafts.heads import train_heads
    from sprinter.training.drafts.settings import HeadSettings, TextSettings, TrainingSettings

    seed = training.seed
    written = TextSettings(seed=seed, **asdict(texts))
    shape = HeadSettings(
        kind, heads, blocks, share_output, discount, regression, vocabulary, keep_states, seed
    )
    trained = TrainingSettings(**training.settings())
    placing.check(loading)
    pair, weights = load_target(loading)
    facts = train_heads(
        pair, weights, [*data, *(more or ())], out, written, shape, trained, restart=restart, **asdict(placing),
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
