"""What the commands of ``sprinter draft`` share: the target in float32, options of texts, progress lines."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sprinter.cli.loading import Loading, load

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sprinter.engine.pair import Pair
    from sprinter.training.drafts.data import TextsProgress
    from sprinter.training.drafts.train import LossPoint

__all__ = [
    "ChatOption", "DataOption", "FieldOption", "HeldOutOption", "LimitOption", "MoreOption", "NewTokensOption",
    "PromptTokensOption", "SplitOption", "SystemOption", "TemperatureOption", "load_target", "on_texts", "on_training",
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
NewTokensOption = Annotated[int, typer.Option(help="Maximum length of the target's answers.")]
PromptTokensOption = Annotated[int, typer.Option(help="Maximum prompt length.")]
TemperatureOption = Annotated[
    float, typer.Option("--temperature", "-t", help="The target writes at it: that of later use.")
]
HeldOutOption = Annotated[float, typer.Option(help="Share of the prompts that the draft is evaluated on.")]


def load_target(loading: Loading) -> tuple[Pair, PreTrainedModel]:
    """The target as it was asked for, and its weights in float32 on the CPU."""
    from torch import nn

    from sprinter import load_pair
    from sprinter.models.pair import builtin_paths, load_models

    source = loading.target or builtin_paths()["target"]
    given = {name: value for name, value in loading.given().items() if name != "target"}

    pair = load(loading) if loading.target is not None else load_pair(source, **given)
    target = pair.models.target
    if (
        isinstance(target.model, nn.Module)
        and target.weights == "float32"
        and target.model.device.type == "cpu"
    ):
        return pair, target.module("distilling")
    options = {name: given[name] for name in ("tokenizer", "revision", "trust_remote_code") if name in given}
    floats = load_models(source, device="cpu", dtype="float32", dequantise=True, **options)
    return pair, floats.target.module("distilling")


def on_texts(progress: TextsProgress) -> None:
    """Report written texts on standard error."""
    speed = progress.tokens / max(1e-9, progress.seconds)
    left = ""
    if progress.tokens and progress.done < progress.wanted:
        left = f", about {progress.seconds / progress.done * (progress.wanted - progress.done):.0f} s left"
    _say(f"texts {progress.done}/{progress.wanted}, {speed:.0f} tokens/s{left}")


def on_training(point: LossPoint, steps: int, label: str = "") -> None:
    """Report a checkpoint on standard error."""
    shown = point.held_out or point.train
    where = "held out" if point.held_out else "training"
    left = (
        f", about {point.seconds / point.step * (steps - point.step):.0f} s left"
        if point.step < steps
        else ""
    )
    _say(
        f"{label}step {point.step}/{steps}: {where} β {1 - shown['tv']:.3f}, ce {shown['ce']:.3f}, "
        f"kl {shown['kl']:.3f}; {point.tokens:,} positions, {point.seconds:.0f} s{left}"
    )


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)
