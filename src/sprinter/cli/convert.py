"""``sprinter convert``: writes models in other formats."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from sprinter.cli.loading import quiet_libraries
from sprinter.cli.pages import print_json

__all__ = ["convert"]

convert = typer.Typer(help="Write a model in another format.")


@convert.callback(invoke_without_command=True)
def _before(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@convert.command()
def gguf(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or hub id.", show_default=False)],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new file, *.gguf.", show_default=False)],
    dtype: Annotated[
        Literal["f32", "f16", "q8_0"], typer.Option(help="How the matrices are stored; norms stay f32.")
    ] = "f16",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Write a GGUF file for llama.cpp from a Llama-architecture model with a byte-level BPE tokenizer."""
    quiet_libraries()
    from sprinter.models.convert import convert_gguf

    path = convert_gguf(source, out, dtype, _progress if sys.stderr.isatty() else lambda done, wanted: None)
    size = path.stat().st_size
    if json:
        print_json({"file": str(path), "dtype": dtype, "bytes": size})
    else:
        print(f"{path}: {dtype}, {size / 2**20:.1f} MiB")
    return 0


def _progress(done: int, wanted: int) -> None:
    end = "\n" if done == wanted else ""
    print(f"\r{done}/{wanted} tensors", end=end, file=sys.stderr, flush=True)
