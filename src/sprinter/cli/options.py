"""Options that several commands share: each has one name, one help and one set of bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from sprinter.cli.loading import Loading, MaybeText
from sprinter.cli.signature import option
from sprinter.errors import UserError

__all__ = [
    "ON_TARGET", "READING", "DataOption", "FieldOption", "FiguresOption", "JsonOption", "LabelsOption",
    "MoreLabelsOption", "MoreOption", "PlacingOptions", "ProbingOptions", "RepeatsOption", "RestartOption",
    "RunCodeOption", "SystemOption", "complete_method", "refuse_unused",
]  # fmt: skip

ON_TARGET = (
    "draft", "draft_revision", "draft_vocabulary", "draft_dtype", "draft_runner", "gate", "head", "compile",
    "cache_dtype", "suffix_cache", "template",
)  # fmt: skip
"""Options of ``Loading`` that a command which makes a draft for a target does not have."""

READING = "limit field split chat system"
"""Options that say how texts are read, as a panel has them."""

_texts = partial(option, panel="Texts")
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
