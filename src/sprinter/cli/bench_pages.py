"""Tables of ``sprinter bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sprinter.cli.pages import console, print_files, print_table
from sprinter.plots import no_plots

__all__ = ["print_changes", "print_summary", "print_written"]


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


def print_changes(changes: Sequence[Any], everything: bool) -> None:
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
