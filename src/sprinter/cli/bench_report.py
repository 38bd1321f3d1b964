"""``sprinter bench report``: the page of a run, made again from its results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.pages import console

__all__ = ["command"]


def command(
    results: Annotated[Path, typer.Argument(help="results.json, or the directory of a run.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML file.", show_default="report.html beside it")
    ] = None,
) -> None:
    """Write the report of a run, one HTML file that needs nothing else."""
    from sprinter.bench.report import write_report
    from sprinter.bench.results import read_results

    folder = results if results.is_dir() else results.parent
    path = write_report(read_results(results), out or folder / "report.html")
    console().print(f"wrote {path}")
