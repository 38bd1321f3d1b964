"""Options that several commands share: each has one name, one help and one set of bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sprinter.cli.loading import Loading, MaybeText
from sprinter.cli.signature import option
from sprinter.errors import UserError

__all__ = [
    "ON_TARGET", "DataOption", "FieldOption", "FiguresOption", "JsonOption", "LabelsOption", "MoreLabelsOption",
    "MoreOption", "PlacingOptions", "ProbingOptions", "ReadingOptions", "RepeatsOption", "RestartOption",
    "RunCodeOption", "SteppingOptions", "SystemOption", "TextOptions", "TrainingOptions", "complete_method",
    "refuse_unused",
]  # fmt: skip

ON_TARGET = (
    "draft", "draft_revision", "draft_vocabulary", "draft_dtype", "draft_runner", "gate", "head", "compile",
)  # fmt: skip
"""Options of ``Loading`` that a command which makes a draft for a target does not have."""

_texts = partial(option, panel="Texts")
_training = partial(option, panel="Training")
_ray = partial(option, panel="Ray")

JsonOption = Annotated[bool, option("Print one JSON object.", "--json")]
RestartOption = Annotated[bool, option("Start again: delete earlier results first.", "--restart")]
RunCodeOption = Annotated[bool, option("Run generated code, in a subprocess with limits.")]
FiguresOption = Annotated[bool, option("Draw PNG files beside the numbers.")]
RepeatsOption = Annotated[int, option("Bootstrap samples for the intervals.", min=20)]
DataOption = Annotated[
    list[str],
    option(
        "Texts: .txt (one per line, see --split), .jsonl (both also .gz), .parquet, or a data set's name; records "
        "also with messages, or with a prompt or question and its answer; may be repeated.",
        default=False,
    ),
]
MoreOption = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE]...", help="More data, as in --data *.gz.", show_default=False),
]
FieldOption = Annotated[
    MaybeText,
    _texts(
        "Field of a record that holds its text; dots separate nested fields.",
        default="text, prompt, question, turns or content",
    ),
]
SystemOption = Annotated[MaybeText, _texts("System message before all prompts, in chat form.", default=False)]
LabelsOption = Annotated[
    list[Path], option("Directory made by 'sprinter gate label'; may be repeated.", default=False)
]
MoreLabelsOption = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[DIR]...", help="More labels, as in --labels labels/*.", show_default=False),
]


@dataclass(frozen=True, slots=True)
class ReadingOptions:
    """How texts are read from files."""

    limit: Annotated[int | None, _texts("Maximum number of texts.", default="all")] = None
    field: FieldOption = None
    split: Annotated[
        Literal["lines", "blank-lines", "file"],
        _texts("What one text of a .txt file is: a line, a block between blank lines, the file."),
    ] = "lines"
    chat: Annotated[
        bool, _texts("Every text is a prompt of a user; prompts go through the chat template.", "--chat")
    ] = False
    system: SystemOption = None


@dataclass(frozen=True, slots=True)
class TextOptions(ReadingOptions):
    """Texts that a target writes for a draft."""

    new_tokens: Annotated[int, _texts("Maximum length of the target's answers.", "--max-new-tokens")] = 256
    prompt_tokens: Annotated[int, _texts("Maximum prompt length.")] = 512
    temperature: Annotated[
        float, _texts("The target writes at it: that of later use.", "--temperature", "-t")
    ] = 1.0
    held_out: Annotated[float, _texts("Share of the prompts that the draft is evaluated on.")] = 0.05


@dataclass(frozen=True, slots=True)
class SteppingOptions:
    """The steps of a training."""

    tokens: Annotated[int, _training("Tokens per step, prompts included.")] = 2048
    lr: Annotated[float, _training("Peak learning rate of AdamW.")] = 1e-3
    seed: Annotated[int, _training("Seed of texts, weights and batches.")] = 0
    threads: Annotated[int | None, _training("CPU threads for training.", default="torch's")] = None


@dataclass(frozen=True, slots=True)
class TrainingOptions(SteppingOptions):
    """The training of a draft."""

    loss: Annotated[str, _training("ce, kl, reverse-kl, tv, or a mix such as 0.1*ce+0.9*tv.")] = "ce+kl"
    warm_up: Annotated[float, _training("Share of the steps that minimise ce+kl first.")] = 0.0
    epochs: Annotated[float, _training("Passes over the texts.")] = 4.0
    steps: Annotated[int | None, _training("Steps, instead of --epochs.", default="by --epochs")] = None
    minutes: Annotated[
        float | None, _training("Maximum time of training; the schedule ends with it.", default="no limit")
    ] = None
    loss_temperature: Annotated[
        float | None, _training("Temperature of the laws in the loss.", default="that of the texts")
    ] = None
    checkpoint: Annotated[int, _training("Steps between checkpoints.")] = 100
    precision: Annotated[
        Literal["float32", "bfloat16"],
        _training("Dtype of matrix products in training; bfloat16 is faster where the processor has it."),
    ] = "float32"

    def settings(self) -> dict[str, Any]:
        """The fields by their names in ``TrainingSettings``."""
        given = asdict(self)
        temperature = given.pop("loss_temperature")
        return given | {"temperature": temperature}


@dataclass(frozen=True, slots=True)
class PlacingOptions:
    """Where something is computed that workers of Ray can compute too."""

    engine: Annotated[
        Literal["local", "ray"], _ray("Where it is computed: in this process, or on a Ray cluster.")
    ] = "local"
    workers: Annotated[int | None, _ray("Workers of the ray engine.", default="2")] = None
    ray_address: Annotated[MaybeText, _ray("Address of a Ray cluster.", default="one on this machine")] = None

    def check(self, loading: Loading) -> None:
        """Raise a UserError for options of loading that workers would not know."""
        alone = {"trust_remote_code", "device_map", "draft_dtype", "draft_runner"}
        if self.engine == "ray" and (given := loading.given().keys() & alone):
            option = sorted(given)[0].replace("_", "-")
            raise UserError(f"the workers of --engine ray load models without --{option}: use --engine local")


@dataclass(frozen=True, slots=True)
class ProbingOptions:
    """A probe of a pair: texts of both models for the same prompts."""

    prompts: Annotated[Path | None, _texts("Text file, one prompt a line.", default="12 built-in ones")] = (
        None
    )
    texts: Annotated[int, _texts("Texts by each model.", min=2)] = 24
    max_new_tokens: Annotated[int, _texts("Tokens per text.", "--max-new-tokens", "-n", min=1)] = 64
    temperature: Annotated[float, _texts("0 is greedy.", "--temperature", "-t")] = 1.0
    seed: Annotated[int, _texts("The same seed gives the same result.")] = 0


def complete_method(incomplete: str) -> list[str]:
    """Names of methods that begin with the given text. Imports torch, so that the first Tab takes seconds."""
    from sprinter.decode import METHODS

    return [name for name in METHODS.names() if name.startswith(incomplete)]


def refuse_unused(command: Callable[..., Any], given: Mapping[str, Any], why: str) -> None:
    """Refuse options that were given although they have no effect.

    Args:
        command: the command, whose signature has the defaults.
        given: values of the options that have no effect here, by parameter name.
        why: end of the message: in which case they have no effect, and how to fix it.

    Raises:
        UserError: an option differs from its default; names the first.
    """
    parameters = inspect.signature(command).parameters
    for name, value in given.items():
        default = parameters[name].default
        if value != default and value != []:
            shown = f"MODEL {value[0]}" if name == "models" else f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{shown} has no effect {why}")
