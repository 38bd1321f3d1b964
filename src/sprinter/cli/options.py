"""Options that several commands have: said once, the same everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = [
    "Compile",
    "Device",
    "DeviceMap",
    "DraftOption",
    "DraftRevision",
    "Dtype",
    "GateOption",
    "Heads",
    "Revision",
    "RunnerOption",
    "Target",
    "Tokenizer",
    "TopK",
    "TopP",
    "TrustRemoteCode",
]

_MODELS = "Models"  # their panel of the help page

Target = Annotated[
    str | None,
    typer.Option(
        help="Directory, hub id or GGUF file of the target.",
        show_default="built-in pair",
        rich_help_panel=_MODELS,
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option(help="Directory, hub id or GGUF file of the draft.", rich_help_panel=_MODELS),
]
GateOption = Annotated[
    str | None,
    typer.Option(help="Directory or hub id of a gate made for this draft.", rich_help_panel=_MODELS),
]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        help="Directory or hub id of a head for specdec++ or disco; may be repeated.",
        show_default=False,
        rich_help_panel=_MODELS,
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Where it is not the target's own.", rich_help_panel=_MODELS)
]
Revision = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the target on the hub.", rich_help_panel=_MODELS),
]
DraftRevision = Annotated[str | None, typer.Option(help="Likewise of the draft.", rich_help_panel=_MODELS)]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run model code that comes with a checkpoint.", rich_help_panel=_MODELS
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, mps, ...", show_default="the best there is", rich_help_panel=_MODELS),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="auto, balanced, ...: spread large models over devices (accelerate), in place of --device.",
        rich_help_panel=_MODELS,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, ...; with --runner llamacpp float32, float16 or q8_0.",
        show_default="by device",
        rich_help_panel=_MODELS,
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Capture short passes, on a CPU compiled once (minutes) and kept on disk.",
        show_default="where it costs nothing",
        rich_help_panel=_MODELS,
    ),
]
RunnerOption = Annotated[
    Literal["auto", "torch", "llamacpp"],
    typer.Option(
        help="auto: llama.cpp for GGUF files. llamacpp: other models are converted once, and kept.",
        rich_help_panel=_MODELS,
    ),
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share; 1 keeps all.")]
