"""Options for loading models, the same for every command; loads the pair that they name."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from sprinter.cli.prompts import read_text
from sprinter.cli.signature import Decorator, option, takes
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.engine.options import GenerationOptions
    from sprinter.engine.pair import Pair

__all__ = ["Loading", "check_models", "debugging", "load", "loads", "quiet_libraries"]

MaybeText = str | None
RunnerName = Literal["auto", "torch", "llamacpp"]


_model = partial(option, panel="Models")
_run = partial(option, panel="How models run")


@dataclass(frozen=True, slots=True)
class Loading:
    """Which models to load, and how. Each field is an option; ``loads`` adds them to a command.

    Raises:
        UserError: options exclude each other, or a revision was given without its model.
    """

    target: Annotated[
        MaybeText, _model("Directory, hub id or GGUF file of the target.", default="built-in pair")
    ] = None
    draft: Annotated[MaybeText, _model("Directory, hub id or GGUF file of the draft.")] = None
    gate: Annotated[MaybeText, _model("Directory or hub id of a gate made for this draft.")] = None
    head: Annotated[
        list[str] | None,
        _model(
            "Directory or hub id of a head for specdec++, disco, judge or diversed, or of heads that draft; may "
            "be repeated.",
            default=False,
        ),
    ] = None
    tokenizer: Annotated[MaybeText, _model("Tokenizer, if not the target's own.")] = None
    template: Annotated[
        MaybeText, _model("File with a chat template (Jinja).", default="the tokenizer's own")
    ] = None
    revision: Annotated[MaybeText, _model("Branch, tag or commit of the target on the hub.")] = None
    draft_revision: Annotated[MaybeText, _model("Branch, tag or commit of the draft on the hub.")] = None
    draft_vocabulary: Annotated[
        MaybeText,
        _model(
            "Tokens that the draft, or heads, may write: a number, or a file by 'sprinter draft vocabulary'.",
            default="all",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool, _model("Run model code that comes with a checkpoint.", "--trust-remote-code")
    ] = False
    device: Annotated[MaybeText, _run("cpu, cuda, mps, ...", default="the best there is")] = None
    device_map: Annotated[
        MaybeText,
        _run("auto, balanced, ...: spread large models over devices (accelerate), instead of --device."),
    ] = None
    dtype: Annotated[
        MaybeText,
        _run(
            "float32, bfloat16, ...; int8; on a CPU int4 or gguf; with --runner llamacpp float32, float16 or "
            "q8_0.",
            default="by device",
        ),
    ] = None
    draft_dtype: Annotated[MaybeText, _run("dtype of the draft, if it differs.", default="as --dtype")] = None
    cache_dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float8_e4m3"] | None,
        _run(
            "Keys and values, where our kernels run both models on a CPU (bfloat16 takes half of the memory), or on a "
            "CUDA GPU (no wider than the weights).",
            default="float32 on a CPU, else as the weights",
        ),
    ] = None
    runner: Annotated[
        RunnerName,
        _run(
            "auto: for GGUF files what 'doctor --probe' found to be fastest here, else our kernels on a CPU, else "
            "llama.cpp. torch: PyTorch, GGUF files are dequantised. llamacpp: other models are converted once, and "
            "cached."
        ),
    ] = "auto"
    draft_runner: Annotated[
        RunnerName | None, _run("Runner of the draft, if it differs.", default="as --runner")
    ] = None
    compile: Annotated[
        bool | None,
        _run(
            "Run forward passes through our kernels on a CPU, through CUDA graphs on a GPU.",
            "--compile/--no-compile",
            default="if it costs nothing",
        ),
    ] = None
    profile: Annotated[
        MaybeText,
        _model("Profile of this pair by 'sprinter tune': the fastest setting within --budget, or exact."),
    ] = None
    suffix_cache: Annotated[
        MaybeText,
        _model(
            "File of earlier texts, from which --method suffix drafts; read if it exists, written at the end."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.device is not None and self.device_map is not None:
            raise UserError("--device-map takes the place of --device: give one of them")
        self.spelled_template()  # before models are loaded
        if self.trust_remote_code and (self.target, self.draft, self.tokenizer) == (None, None, None):
            raise UserError(
                "trust_remote_code=True is for models that bring code; the built-in pair has none: give --target too"
            )
        for which in ("draft_dtype", "draft_runner"):
            if getattr(self, which) is not None and self.draft is None:
                raise UserError(f"{which}={getattr(self, which)} is of a draft: give --draft too")
        for which in ("revision", "draft_revision"):
            model = "draft" if which == "draft_revision" else "target"
            if getattr(self, which) is not None and getattr(self, model) is None:
                raise UserError(
                    f"{which}={getattr(self, which)} is of a {model} on the hub: give --{model} too"
                )

    def spelled_template(self) -> str | None:
        """Text of the file with a chat template."""
        if self.template is None:
            return None
        return read_text(
            Path(self.template).expanduser(), f"--template {self.template}", "a file with a Jinja template"
        )

    def given(self) -> dict[str, Any]:
        """Options with values other than their defaults, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def arguments(self) -> dict[str, Any]:
        """Arguments for ``load_pair``: the options that were given."""
        given = {"target": None, "draft": None, "gate": None, **self.given()}
        if (kept := self.draft_vocabulary) is not None and kept.isdecimal():
            given["draft_vocabulary"] = int(kept[:400])  # as long as Python reads it: it is refused
        given.pop("template", None)
        return {"heads": given.pop("head", ()), **given}


def loads(*without: str) -> Decorator:
    """Decorator of a command: replaces its parameter ``loading: Loading`` by the options of ``Loading``.

    Args:
        without: fields that the command does not offer, because they have no effect on it.
    """
    return takes("loading", Loading, without=without)


def load(loading: Loading, **defaults: Any) -> Pair:
    """Call ``sprinter.load_pair`` with these options.

    Args:
        defaults: arguments of ``load_pair`` for options that were not given.
    """
    quiet_libraries()
    from sprinter import load_pair

    pair = load_pair(**{**defaults, **loading.arguments()})
    if (template := loading.spelled_template()) is not None:
        if pair.tokenizer is None:
            raise UserError("--template is for a tokenizer, and this pair has none: give --tokenizer")
        pair.tokenizer.chat_template = template
    if pair.runner_reason is not None:
        logging.getLogger("sprinter").warning("runner: %s", pair.runner_reason)
    return pair


def check_models(options: GenerationOptions, loading: Loading) -> None:
    """Refuse a method that needs a model that was not given, or a budget of none, before any model is loaded.

    Raises:
        UserError: which model it needs.
    """
    from sprinter.engine.runtime import check_budget

    if loading.profile is None:
        check_budget(options)
    method = options.method
    if loading.target is None or method is None:
        return
    if loading.draft is None and method.drafter.uses_model:
        raise UserError(
            f"method {method.name} needs a draft model: give --draft too, or --method autoregressive"
        )
    if loading.gate is None and "gate" in method.needs:
        raise UserError(
            f"method {method.name} needs a gate: give --gate too, or another method such as speculative"
        )


def debugging() -> bool:
    """Whether SPRINTER_DEBUG asks for tracebacks and for the libraries' own messages."""
    return os.environ.get("SPRINTER_DEBUG", "") not in ("", "0")


def quiet_libraries() -> None:
    """Hide progress bars of loading unless debugging; downloads still show theirs on a terminal."""
    if debugging():
        return
    from sprinter.models.progress import set_bars

    set_bars(weights=False, downloads=sys.stderr.isatty())
