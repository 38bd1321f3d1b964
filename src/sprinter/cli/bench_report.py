"""``sprinter bench report``: writes the report of a run again, from its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.bench_pages import print_written
from sprinter.errors import UserError

__all__ = ["command"]


def command(
    results: Annotated[Path, typer.Argument(help="results.json, or the directory of a run.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="HTML file.", show_default="report.html in the same directory"),
    ] = None,
) -> None:
    """Write the report of a run as one self-contained HTML file."""
    from sprinter.bench.report import write_report
    from sprinter.bench.results import read_results

    folder = results if results.is_dir() else results.parent
    found, file = read_results(results), out or folder / "report.html"
    try:
        path = write_report(found, file)
    except OSError as error:
        raise UserError(f"cannot write '{file}' ({error.strerror}): give another --out") from None
    print_written(path)
