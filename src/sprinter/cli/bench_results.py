"""``sprinter bench compare``, ``report`` and ``list``; tables of a run and of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sprinter.cli.options import JsonOption
from sprinter.cli.pages import console, print_files, print_json, print_table
from sprinter.cli.signature import option
from sprinter.errors import UserError
from sprinter.plots import no_plots

__all__ = ["compare", "names", "print_summary", "print_written", "report"]


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
        _print_changes(changes, everything)
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

    suites, arms = suite_names(), arm_names()
    if json:
        print_json({"suites": suites, "arms": arms})
        return
    print_table(("name", "what it is"), suites.items(), title="suites", left=2)
    rows = ((arm["name"], arm["spec"], arm["engine"]) for arm in arms)
    print_table(("name", "spec", "engine"), rows, title="arms", left=3)


def _interval(value: Sequence[float | None] | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    middle, low, high = value
    if low is None or high is None:
        return f"{middle:.{digits}f} (n=1)"
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def print_summary(results: dict[str, Any]) -> None:
    """Print one table per suite and temperature, fastest arm first; then the arms that failed."""
    summary = results["summary"]
    bases = [name for name in results["settings"]["bases"] if any(name in s["speed_over"] for s in summary)][
        :2
    ]
    columns = (
        "arm", "tokens/s", *(f"÷ {base}" for base in bases), "calls/token", "mean drift", "TTFT ms", "gap p95",
        "lossless",
    )  # fmt: skip
    keys = {(s["suite"], s["temperature"]) for s in summary}
    for suite, temperature in sorted(keys, key=lambda key: (key[0], -key[1])):
        rows = [
            (
                s["arm"], f"{s['tokens_per_s']:.0f}", *(_interval(s["speed_over"].get(base)) for base in bases),
                _number(s["target_calls_per_token"] and s["target_calls_per_token"][0], 3),
                _interval(s["mean_drift"], 3), _number(s["ttft_ms"] and s["ttft_ms"]["p50"], 1),
                _number(s["gap_ms"] and s["gap_ms"]["p95"], 1), {True: "yes", False: "no", None: "?"}[s["lossless"]],
            )
            for s in sorted(summary, key=lambda s: -s["tokens_per_s"])
            if (s["suite"], s["temperature"]) == (suite, temperature)
        ]  # fmt: skip
        print_table(columns, rows, title=f"{suite}, temperature {temperature:g}")
    for arm in results["arms"]:
        if arm["status"] == "failed":
            console().print(f"failed: {arm['name']}: {arm['error']}", style="red", markup=False)
    console().print(f"{results['seconds']:.0f} s; 95 % bootstrap intervals over prompts, arms interleaved.")


def print_written(*files: Path) -> None:
    """Name the files of a run, and say so if the report has no pictures."""
    reason = no_plots()
    print_files(files, f" without pictures; {reason}" if reason else "")


def _print_changes(changes: Sequence[Any], everything: bool) -> None:
    """Print what ``compare`` found; unchanged numbers only with ``everything``."""
    from rich.text import Text

    shown = [change for change in changes if everything or change.verdict in ("worse", "better")]
    rows = (
        (
            Text(one.verdict, {"worse": "red", "better": "green"}.get(one.verdict, "")), one.arm, one.suite,
            f"{one.temperature:g}", one.measure, f"{one.before:.4g}", f"{one.after:.4g}", _interval(one.ratio, 3),
        )
        for one in shown
    )  # fmt: skip
    if shown:
        print_table(("verdict", "arm", "suite", "T", "measure", "before", "after", "change"), rows, left=5)
    worse, better = (sum(one.verdict == verdict for one in changes) for verdict in ("worse", "better"))
    console().print(f"{worse} worse, {better} better, of {len(changes)} numbers.")
