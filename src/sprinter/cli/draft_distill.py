"""``sprinter draft distill``: makes a draft model from texts that the target writes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from sprinter.cli.draft_common import load_target, on_texts, on_training
from sprinter.cli.loading import Loading, loads
from sprinter.cli.options import (
    ON_TARGET,
    DataOption,
    JsonOption,
    MoreOption,
    RestartOption,
    TextOptions,
    TrainingOptions,
)
from sprinter.cli.pages import console, print_json, print_table
from sprinter.cli.signature import option, takes

__all__ = ["command"]


@loads(*ON_TARGET)
@takes("texts", TextOptions)
@takes("training", TrainingOptions, loss="0.1*ce+0.9*tv", warm_up=0.5)
def command(
    data: DataOption,
    out: Annotated[Path, option("Folder of the draft.", default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    layers: Annotated[int, option("Decoder layers.")] = 2,
    width: Annotated[
        int | None, option("Hidden size; a smaller one projects the embeddings.", default="the target's")
    ] = None,
    vocabulary: Annotated[
        int | None,
        option(
            "Tokens that the output layer knows; others are never drafted. Only Sprinter loads such a draft.",
            default="all",
        ),
    ] = None,
    training: TrainingOptions = TrainingOptions(),
    freeze_embeddings: Annotated[
        bool, option("Keep the target's embeddings as they are.", "--freeze-embeddings")
    ] = False,
    on_policy: Annotated[
        float, option("Share of the steps, the last ones, that also see the draft's own drafts.")
    ] = 0.0,
    gamma: Annotated[int, option("Length of those drafts.")] = 5,
    texts: TextOptions = TextOptions(),
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Distil a draft from a target: it writes texts, a small model learns its laws on them, and is measured.

    To continue a run that was interrupted, give the same command again.
    """
    from sprinter.training.drafts.distill import distill
    from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings

    seed = training.seed
    written = TextSettings(seed=seed, **asdict(texts))
    student = StudentSettings(layers=layers, width=width, vocabulary=vocabulary, seed=seed)
    trained = TrainingSettings(
        **training.settings(), freeze_embeddings=freeze_embeddings, on_policy=on_policy, gamma=gamma
    )
    pair, weights = load_target(loading)
    facts = distill(
        pair, weights, [*data, *(more or ())], out, written, student, trained, restart=restart,
        on_texts=on_texts, on_training=on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    names = [*dict.fromkeys(name for row in facts["tasks"].values() for name in row)]
    rows = (
        [task, *(f"{row[name]:.3f}" if name in row else "–" for name in names)]
        for task, row in facts["tasks"].items()
    )
    heads = [name.replace("_", " ") for name in ("task", *names)]
    print_table(heads, rows, title=f"held-out prompts, {facts['method']}")
    console().print(
        f"{facts['student']['parameters']:,} parameters a step, trained in {facts['training']['seconds']:.0f} s; "
        f"saved in {out}"
    )
