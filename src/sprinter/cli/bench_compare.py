"""``sprinter bench compare``: what became better or worse between two runs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sprinter.cli.bench_pages import print_changes
from sprinter.cli.pages import print_json
from sprinter.errors import UserError

__all__ = ["command"]


def command(
    before: Annotated[Path, typer.Argument(metavar="A", help="results.json, or the directory of a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same for the later run.")],
    base: Annotated[
        str | None, typer.Option(help="Speeds are judged relative to this arm.", show_default="a plain one")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Relative change to accept in addition to chance.")
    ] = 0.0,
    across: Annotated[
        bool, typer.Option("--across", help="Compare runs even if models, prompts or settings differ.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show unchanged numbers too.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> int:
    """Compare two runs; exit status 1 if anything became worse by more than chance explains (95 % intervals)."""
    from sprinter.bench.compare import compare
    from sprinter.bench.results import read_results

    if tolerance >= 1:
        raise UserError(f"tolerance={tolerance} is out of range: give a share below 1, such as 0.02")
    changes = compare(
        read_results(before), read_results(after), base=base, tolerance=tolerance, across=across
    )
    worse = any(change.verdict == "worse" for change in changes)
    if json:
        print_json({"regression": worse, "changes": [asdict(change) for change in changes]})
    else:
        print_changes(changes, everything)
    return 1 if worse else 0
