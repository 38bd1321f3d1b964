"""``sprinter convert``: writes models in other formats."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from sprinter.cli.loading import quiet_libraries
from sprinter.cli.options import JsonOption
from sprinter.cli.pages import print_json
from sprinter.cli.progress import Progress
from sprinter.cli.signature import option

__all__ = ["GROUP"]


def gguf(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or hub id.", show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new file, *.gguf.", show_default=False)],
    dtype: Annotated[
        Literal["f32", "f16", "q8_0"], option("How the matrices are stored; norms stay f32.")
    ] = "f16",
    json: JsonOption = False,
) -> int:
    """Write a GGUF file for llama.cpp from a Llama-architecture model with a byte-level BPE tokenizer."""
    quiet_libraries()
    from sprinter.models.convert import convert_gguf

    with Progress(shown=sys.stderr.isatty()) as progress:
        path = convert_gguf(source, out, dtype, lambda done, wanted: progress("tensors", done, wanted))
    size = path.stat().st_size
    if json:
        print_json({"file": str(path), "dtype": dtype, "bytes": size})
    else:
        print(f"{path}: {dtype}, {size / 2**20:.1f} MiB")
    return 0


GROUP = {"gguf": gguf}
