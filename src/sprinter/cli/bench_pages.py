"""Progress and tables of ``sprinter bench``."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sprinter.cli.pages import console
from sprinter.plots import no_plots

__all__ = ["BenchProgressBar", "print_changes", "print_summary", "print_written"]

_EVERY_S = 20  # between progress lines if standard error is not a terminal


class BenchProgressBar:
    """Progress of a bench: a bar on a terminal, elsewhere a line every 20 seconds and at the end.

    A context manager; call it with (texts done, texts in total, what is running).
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False), console=Console(stderr=True),
            disable=not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._began, self._first, self._done, self._said = time.monotonic(), 0, -1, 0.0

    def __enter__(self) -> BenchProgressBar:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, done: int, wanted: int, note: str) -> None:
        self._bar.update(self._task, completed=done, total=wanted, description=note)
        now = time.monotonic()
        if self._done < 0 or done < self._done:  # the next stage begins
            self._first, self._began = done, now
        self._done = done
        if self._bar.disable and (now - self._said > _EVERY_S or done >= wanted):
            self._said = now
            rate = (now - self._began) / max(1, done - self._first)
            left = f", about {rate * (wanted - done) / 60:.1f} min left" if done > self._first else ""
            print(f"{done}/{wanted}{left}: {note}", file=sys.stderr, flush=True)


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
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    bases = [
        name
        for name in results["settings"]["bases"]
        if any(name in s["speed_over"] for s in results["summary"])
    ]
    keys = sorted(
        {(s["suite"], s["temperature"]) for s in results["summary"]}, key=lambda key: (key[0], -key[1])
    )
    for suite, temperature in keys:
        rows = [s for s in results["summary"] if (s["suite"], s["temperature"]) == (suite, temperature)]
        table = Table(
            title=escape(f"{suite}, temperature {temperature:g}"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        table.add_column("arm")
        heads = [
            "tokens/s",
            *(escape(f"÷ {base}") for base in bases[:2]),
            "calls/token",
            "mean drift",
            "TTFT ms",
            "gap p95",
        ]
        for head in heads:
            table.add_column(head, justify="right")
        table.add_column("lossless")
        for s in sorted(rows, key=lambda s: -s["tokens_per_s"]):
            calls, drift = s["target_calls_per_token"], s["mean_drift"]
            exact = {True: "yes", False: "no", None: "?"}[s["lossless"]]
            cells = [
                f"{s['tokens_per_s']:.0f}",
                *(_interval(s["speed_over"].get(base)) for base in bases[:2]),
            ]
            cells += [_number(calls and calls[0], 3), _interval(drift, 3)]
            cells += [
                _number(s["ttft_ms"] and s["ttft_ms"]["p50"], 1),
                _number(s["gap_ms"] and s["gap_ms"]["p95"], 1),
            ]
            table.add_row(escape(s["arm"]), *cells, exact)
        console().print(table)
    for arm in results["arms"]:
        if arm["status"] == "failed":
            console().print(f"failed: {arm['name']}: {arm['error']}", style="red", markup=False)
    console().print(f"{results['seconds']:.0f} s; 95 % bootstrap intervals over prompts, arms interleaved.")


def print_written(*files: Path) -> None:
    """Name the files of a run, and say so if the report has no pictures."""
    reason = no_plots()
    console().print(f"wrote {', '.join(map(str, files))}{f' without pictures; {reason}' if reason else ''}")


def print_changes(changes: Sequence[Any], everything: bool) -> None:
    """Print what ``compare`` found; unchanged numbers only with ``everything``."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shown = [change for change in changes if everything or change.verdict in ("worse", "better")]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("verdict", "arm", "suite", "T", "measure"):
        table.add_column(head)
    for head in ("before", "after", "change"):
        table.add_column(head, justify="right")
    for change in shown:
        names = map(escape, (change.arm, change.suite, f"{change.temperature:g}", change.measure))
        place = (change.verdict, *names)
        style = {"worse": "red", "better": "green"}.get(change.verdict)
        values = (f"{change.before:.4g}", f"{change.after:.4g}", _interval(change.ratio, 3))
        table.add_row(*place, *values, style=style)
    if shown:
        console().print(table)
    worse = sum(change.verdict == "worse" for change in changes)
    console().print(
        f"{worse} worse, {sum(c.verdict == 'better' for c in changes)} better, of {len(changes)} numbers."
    )
