"""Options that several commands have: said once, the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Device", "Draft", "Dtype", "Gate", "Heads", "Target", "Tokenizer", "TopK", "TopP"]

Target = Annotated[
    str | None, typer.Option(help="Directory or hub id of the target.", show_default="built-in pair")
]
Draft = Annotated[str | None, typer.Option(help="Directory or hub id of the draft.")]
Gate = Annotated[str | None, typer.Option(help="Directory or hub id of a gate made for this draft.")]
Heads = Annotated[
    list[str] | None,
    typer.Option(
        help="Directory or hub id of a head for specdec++ or disco; may be repeated.", show_default=False
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="Where it is not the target's own.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps, ...", show_default="the best there is")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...", show_default="by device")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this share; 1 keeps all.")]
