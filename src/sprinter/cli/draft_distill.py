"""``sprinter draft distill``: makes a draft model from texts that the target writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.draft_common import (
    ChatOption,
    CheckpointOption,
    DataOption,
    EpochsOption,
    FieldOption,
    HeldOutOption,
    JsonOption,
    LimitOption,
    LossOption,
    LossTemperatureOption,
    LrOption,
    MinutesOption,
    MoreOption,
    NewTokensOption,
    PrecisionOption,
    PromptTokensOption,
    RestartOption,
    SeedOption,
    SplitOption,
    StepsOption,
    SystemOption,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    WarmUpOption,
    fields_of,
    load_target,
    on_texts,
    on_training,
)  # fmt: skip
from sprinter.cli.loading import Loading, loads
from sprinter.cli.pages import console, print_json

__all__ = ["command"]


@loads(
    without=(
        "draft",
        "draft_revision",
        "draft_vocabulary",
        "draft_dtype",
        "draft_runner",
        "gate",
        "head",
        "compile",
    )
)
def command(
    data: DataOption,
    out: Annotated[Path, typer.Option(help="Folder of the draft.", show_default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    width: Annotated[
        int | None,
        typer.Option(help="Hidden size; a smaller one projects the embeddings.", show_default="the target's"),
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the output layer knows; others are never drafted. Only Sprinter loads such a draft.",
            show_default="all",
        ),
    ] = None,
    loss: LossOption = "0.1*ce+0.9*tv",
    warm_up: WarmUpOption = 0.5,
    epochs: EpochsOption = 4.0,
    steps: StepsOption = None,
    minutes: MinutesOption = None,
    tokens: TokensOption = 2048,
    lr: LrOption = 1e-3,
    loss_temperature: LossTemperatureOption = None,
    freeze_embeddings: Annotated[
        bool, typer.Option("--freeze-embeddings", help="Keep the target's embeddings as they are.")
    ] = False,
    on_policy: Annotated[
        float, typer.Option(help="Share of the steps, the last ones, that also see the draft's own drafts.")
    ] = 0.0,
    gamma: Annotated[int, typer.Option(help="Length of those drafts.")] = 5,
    new_tokens: NewTokensOption = 256,
    prompt_tokens: PromptTokensOption = 512,
    temperature: TemperatureOption = 1.0,
    held_out: HeldOutOption = 0.05,
    limit: LimitOption = None,
    field: FieldOption = None,
    split: SplitOption = "lines",
    chat: ChatOption = False,
    system: SystemOption = None,
    checkpoint: CheckpointOption = 100,
    seed: SeedOption = 0,
    precision: PrecisionOption = "float32",
    threads: ThreadsOption = None,
    restart: RestartOption = False,
    json: JsonOption = False,
) -> None:
    """Distil a draft from a target: it writes texts, a small model learns its laws on them, and is measured.

    To continue a run that was interrupted, give the same command again.
    """
    from sprinter.training.drafts.distill import distill
    from sprinter.training.drafts.settings import StudentSettings, TextSettings, TrainingSettings

    given: dict[str, Any] = dict(locals())
    texts = TextSettings(**fields_of(TextSettings, given))
    student = StudentSettings(**fields_of(StudentSettings, given))
    training = TrainingSettings(**{**fields_of(TrainingSettings, given), "temperature": loss_temperature})
    pair, weights = load_target(loading)
    facts = distill(
        pair, weights, [*data, *(more or ())], out, texts, student, training, restart=restart,
        on_texts=on_texts, on_training=on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    from rich import box
    from rich.table import Table

    names = [*dict.fromkeys(name for row in facts["tasks"].values() for name in row)]
    table = Table(box=box.SIMPLE_HEAD, title=f"held-out prompts, {facts['method']}", title_justify="left")
    for name in ("task", *names):
        table.add_column(name.replace("_", " "), justify="left" if name == "task" else "right")
    for task, row in facts["tasks"].items():
        table.add_row(task, *(f"{row[name]:.3f}" if name in row else "–" for name in names))
    console().print(table)
    console().print(
        f"{facts['student']['parameters']:,} parameters a step, trained in {facts['training']['seconds']:.0f} s; "
        f"saved in {out}"
    )
