"""``sprinter draft train``: trains heads on the target that draft, on texts that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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
    on_states,
    on_texts,
    on_training,
)
from sprinter.cli.loading import Loading, loads
from sprinter.cli.pages import console, print_json
from sprinter.cli.ray_options import RayAddressOption, WorkersOption, check_ray

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
    out: Annotated[Path, typer.Option(help="Folder of the heads.", show_default=False)],
    more: MoreOption = None,
    loading: Loading = Loading(),
    kind: Annotated[
        Literal["medusa", "eagle", "eagle3", "glide"],
        typer.Option(help="What is trained; 'eagle' is the head of EAGLE and EAGLE-2."),
    ] = "medusa",
    heads: Annotated[
        int | None,
        typer.Option(
            help="Medusa's heads, tokens ahead that are drafted; the others: steps of training.",
            show_default="4; eagle: 1",
        ),
    ] = None,
    blocks: Annotated[int, typer.Option(help="Residual blocks of each of Medusa's heads.")] = 1,
    share_output: Annotated[
        bool,
        typer.Option(
            "--share-output",
            help="All of Medusa's heads end in the target's output layer: far fewer parameters.",
        ),
    ] = False,
    discount: Annotated[
        float, typer.Option(help="Weight of each further head's loss, relative to the last.")
    ] = 0.8,
    regression: Annotated[
        float, typer.Option(help="Weight of EAGLE's loss of states, relative to that of laws.")
    ] = 10.0,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Tokens that EAGLE-3 can draft, the most frequent of the texts.", show_default="all"
        ),
    ] = None,
    keep_states: Annotated[
        bool, typer.Option(help="Keep the target's states on disk; else compute them in every epoch.")
    ] = True,
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="Where states that are kept are computed.")
    ] = "local",
    workers: WorkersOption = None,
    ray_address: RayAddressOption = None,
    loss: LossOption = "ce+kl",
    warm_up: WarmUpOption = 0.0,
    epochs: EpochsOption = 4.0,
    steps: StepsOption = None,
    minutes: MinutesOption = None,
    tokens: TokensOption = 2048,
    lr: LrOption = 1e-3,
    loss_temperature: LossTemperatureOption = None,
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
    """Train heads on the target that draft in place of a draft model: it writes texts, and the heads learn its laws.

    To continue a run that was interrupted, give the same command again. Load them with --head.
    """
    from sprinter.training.drafts.heads import train_heads
    from sprinter.training.drafts.settings import HeadSettings, TextSettings, TrainingSettings

    given: dict[str, Any] = dict(locals())
    texts = TextSettings(**fields_of(TextSettings, given))
    shape = HeadSettings(**fields_of(HeadSettings, given))
    training = TrainingSettings(**{**fields_of(TrainingSettings, given), "temperature": loss_temperature})
    check_ray(engine, loading)
    pair, weights = load_target(loading)
    facts = train_heads(
        pair, weights, [*data, *(more or ())], out, texts, shape, training, restart=restart,
        engine=engine, workers=workers, ray_address=ray_address,
        on_texts=on_texts, on_states=on_states, on_training=on_training,
    )  # fmt: skip
    if json:
        print_json({"out": str(out), **facts})
        return
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"rank of the target's token, {facts['heads']['accuracies_on']} texts",
        title_justify="left",
    )
    for name in ("head", "1st", "2nd", "3rd", "4th", "5th"):
        table.add_column(name, justify="right")
    for number, row in enumerate(facts["heads"]["accuracies"], 1):
        table.add_row(str(number), *(f"{value:.3f}" for value in row[:5]))
    console().print(table)
    for task, row in facts["tasks"].items():
        console().print(
            f"{task}: {row['chain_tokens_per_call']:.2f} tokens a target call as a chain, "
            f"{row['tree_tokens_per_call']:.2f} as a tree"
        )
    console().print(
        f"{facts['heads']['parameters']:,} parameters, trained in {facts['training']['seconds']:.0f} s; saved in {out}"
    )
