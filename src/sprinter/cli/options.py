"""Options that several commands have: said once, the same everywhere."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = [
    "Compile",
    "Device",
    "Draft",
    "Dtype",
    "Gate",
    "Heads",
    "Runner",
    "Target",
    "Tokenizer",
    "TopK",
    "TopP",
]

Target = Annotated[
    str | None,
    typer.Option(help="Directory, hub id or GGUF file of the target.", show_default="built-in pair"),
]
Draft = Annotated[str | None, typer.Option(help="Directory, hub id or GGUF file of the draft.")]
Gate = Annotated[str | None, typer.Option(help="Directory or hub id of a gate made for this draft.")]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        help="Directory or hub id of a head for specdec++ or disco; may be repeated.", show_default=False
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="Where it is not the target's own.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...", show_default="the best there is")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, ...; with --runner llamacpp float32, float16 or q8_0.",
        show_default="by device",
    ),
]
Compile = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Capture short passes, on a CPU compiled once (minutes) and kept on disk.",
        show_default="where it costs nothing",
    ),
]
Runner = Annotated[
    Literal["auto", "torch", "llamacpp"],
    typer.Option(help="auto: llama.cpp for GGUF files. llamacpp: other models are converted once, and kept."),
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share; 1 keeps all.")]
