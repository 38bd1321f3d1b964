"""``sprinter bench compare``, ``report`` and ``list``: results of runs, and the names of suites and arms."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.bench_pages import print_changes, print_written
from sprinter.cli.options import JsonOption
from sprinter.cli.pages import print_json, print_table
from sprinter.cli.signature import option
from sprinter.errors import UserError

__all__ = ["compare", "names", "report"]


def compare(
    before: Annotated[Path, typer.Argument(metavar="A", help="results.json, or the directory of a run.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="The same for the later run.")],
    base: Annotated[
        str | None, option("Speeds are judged relative to this arm.", default="a plain one")
    ] = None,
    tolerance: Annotated[float, option("Relative change to accept in addition to chance.", min=0.0)] = 0.0,
    across: Annotated[
        bool, option("Compare runs even if models, prompts or settings differ.", "--across")
    ] = False,
    everything: Annotated[bool, option("Show unchanged numbers too.", "--all")] = False,
    json: JsonOption = False,
) -> int:
    """Compare two runs; exit status 1 if anything became worse by more than chance explains (95 % intervals)."""
    from sprinter.bench.compare import compare as compared
    from sprinter.bench.results import read_results

    if tolerance >= 1:
        raise UserError(f"tolerance={tolerance} is out of range: give a share below 1, such as 0.02")
    changes = compared(
        read_results(before), read_results(after), base=base, tolerance=tolerance, across=across
    )
    worse = any(change.verdict == "worse" for change in changes)
    if json:
        print_json({"regression": worse, "changes": [asdict(change) for change in changes]})
    else:
        print_changes(changes, everything)
    return 1 if worse else 0


def report(
    results: Annotated[Path, typer.Argument(help="results.json, or the directory of a run.")],
    out: Annotated[
        Path | None, option("HTML file.", "--out", "-o", default="report.html in the same directory")
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


def names(json: JsonOption = False) -> None:
    """List the names of the suites and arms."""
    from sprinter.bench.arms import arm_names
    from sprinter.bench.suites import suite_names

    suites: dict[str, str] = suite_names()
    arms: list[dict[str, Any]] = arm_names()
    if json:
        print_json({"suites": suites, "arms": arms})
        return
    print_table(("name", "what it is"), suites.items(), title="suites", left=2)
    rows = ((arm["name"], arm["spec"], arm["engine"]) for arm in arms)
    print_table(("name", "spec", "engine"), rows, title="arms", left=3)
