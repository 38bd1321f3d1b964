"""What the commands of ``sprinter draft`` share: the target in float32, options of texts, progress lines."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sprinter.cli.loading import Loading, load

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from sprinter.engine.pair import Pair
    from sprinter.models.pair import LoadedModel
    from sprinter.training.drafts.data import TextsProgress
    from sprinter.training.drafts.run import LossPoint

__all__ = [
    "ChatOption", "CheckpointOption", "DataOption", "EpochsOption", "FieldOption", "HeldOutOption", "JsonOption",
    "LimitOption", "LossOption", "LossTemperatureOption", "LrOption", "MinutesOption", "MoreOption", "NewTokensOption",
    "PrecisionOption", "PromptTokensOption", "RestartOption", "SeedOption", "SplitOption", "StepsOption",
    "SystemOption", "TemperatureOption", "ThreadsOption", "TokensOption", "WarmUpOption", "fields_of", "load_target",
    "on_states", "on_texts", "on_training",
]  # fmt: skip

DataOption = Annotated[
    list[str],
    typer.Option(
        help="Prompts: .txt (one per line, see --split), .jsonl (both also .gz), .parquet, or a data set's name; "
        "records also with messages; may be repeated.",
        show_default=False,
    ),
]
MoreOption = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="More data, as in --data *.gz.", show_default=False),
]
FieldOption = Annotated[
    str | None,
    typer.Option(
        help="Field of a record that holds its text.", show_default="text, prompt, question, turns, content"
    ),
]
SplitOption = Annotated[
    Literal["lines", "blank-lines", "file"],
    typer.Option(help="What one text of a .txt file is: a line, a block between blank lines, the file."),
]
ChatOption = Annotated[
    bool,
    typer.Option("--chat", help="Every text is a prompt of a user; prompts go through the chat template."),
]
SystemOption = Annotated[
    str | None, typer.Option(help="System message before all prompts, with --chat.", show_default=False)
]
LimitOption = Annotated[int | None, typer.Option(help="Maximum number of texts.", show_default="all")]
NewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", help="Maximum length of the target's answers.")
]
PromptTokensOption = Annotated[int, typer.Option(help="Maximum prompt length.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", help="The target writes at it: that of later use.")
]
HeldOutOption = Annotated[float, typer.Option(help="Share of the prompts that the draft is evaluated on.")]
LossOption = Annotated[str, typer.Option(help="ce, kl, reverse-kl, tv, or a mix such as 0.1*ce+0.9*tv.")]
WarmUpOption = Annotated[float, typer.Option(help="Share of the steps that minimise ce+kl first.")]
EpochsOption = Annotated[float, typer.Option(help="Passes over the texts.")]
StepsOption = Annotated[
    int | None, typer.Option(help="Steps, instead of --epochs.", show_default="by --epochs")
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="Maximum time of training; the schedule ends with it.", show_default="no limit"),
]
TokensOption = Annotated[int, typer.Option(help="Tokens per step, prompts included.")]
LrOption = Annotated[float, typer.Option(help="Peak learning rate of AdamW.")]
LossTemperatureOption = Annotated[
    float | None,
    typer.Option(help="Temperature of the laws in the loss.", show_default="that of the texts"),
]
CheckpointOption = Annotated[int, typer.Option(help="Steps between checkpoints.")]
SeedOption = Annotated[int, typer.Option(help="Seed of texts, weights and batches.")]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(help="Dtype of matrix products in training; bfloat16 is faster where the processor has it."),
]
ThreadsOption = Annotated[int | None, typer.Option(help="CPU threads for training.", show_default="torch's")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Delete an earlier run in --out first.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")]


def load_target(loading: Loading) -> tuple[Pair, PreTrainedModel]:
    """The target as it was asked for, and its weights in float32, where to train."""
    from torch import nn

    from sprinter import load_pair
    from sprinter.models.pair import builtin_paths, load_models

    source = loading.target or builtin_paths()["target"]
    given = {name: value for name, value in loading.given().items() if name != "target"}

    pair = load(loading) if loading.target is not None else load_pair(source, **given)
    target = pair.models.target
    device = _place_of_training(target, "device_map" in given)
    if isinstance(target.model, nn.Module) and target.weights == "float32" and target.model.device == device:
        return pair, target.module("distilling")
    options = {name: given[name] for name in ("tokenizer", "revision", "trust_remote_code") if name in given}
    floats = load_models(source, device=str(device), dtype="float32", dequantise=True, **options)
    return pair, floats.target.module("distilling")


def _place_of_training(target: LoadedModel, spread: bool) -> torch.device:
    """The target's GPU, if it is on one alone that has room for weights in float32 and as much again, else the CPU."""
    import torch
    from torch import nn

    from sprinter.models.memory import free_bytes

    model = target.model
    if spread or not isinstance(model, nn.Module) or model.device.type != "cuda":
        return torch.device("cpu")
    more = 0 if target.weights == "float32" else 4 * target.size
    room = free_bytes(model.device)
    if room is None or 2 * more < room:
        return model.device
    _say(f"training on the CPU: {more / 1e9:.0f} GB of weights in float32 leave too little room on the GPU")
    return torch.device("cpu")


def on_texts(progress: TextsProgress) -> None:
    """Report written texts on standard error."""
    speed = progress.tokens / max(1e-9, progress.seconds)
    left = ""
    if progress.tokens and progress.done < progress.wanted:
        left = f", about {progress.seconds / progress.done * (progress.wanted - progress.done):.0f} s left"
    _say(f"texts {progress.done}/{progress.wanted}, {speed:.0f} tokens/s{left}")


def on_states(done: int, wanted: int) -> None:
    """Report the target's states that are on disk on standard error."""
    _say(f"states of {done}/{wanted} texts")


def on_training(point: LossPoint, steps: int, label: str = "") -> None:
    """Report a checkpoint on standard error."""
    shown = point.held_out or point.train
    where = "held out" if point.held_out else "training"
    left = (
        f", about {point.seconds / point.step * (steps - point.step):.0f} s left"
        if point.step < steps
        else ""
    )
    firsts = [f"{value:.2f}" for name, value in shown.items() if name.endswith("_top1")]
    ranked = f", first choice right {' '.join(firsts)}" if firsts else ""
    _say(
        f"{label}step {point.step}/{steps}: {where} β {1 - shown['tv']:.3f}, ce {shown['ce']:.3f}, "
        f"kl {shown['kl']:.3f}{ranked}; {point.tokens:,} positions, {point.seconds:.0f} s{left}"
    )


def fields_of(settings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of these settings."""
    return {one.name: given[one.name] for one in fields(settings) if one.name in given}


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
