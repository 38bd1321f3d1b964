"""Tables of the report page, some with bars in their cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from markupsafe import Markup

from sprinter.bench.quality.metrics import METRICS
from sprinter.bench.report.arm_style import ArmStyle
from sprinter.bench.report.breakdown import Categories, LongForm
from sprinter.bench.report.digest import Digest, Summary, drift_of, headline, speed_of
from sprinter.bench.report.numbers import NONE, count, drift, interval, multiple, number, percentage, value
from sprinter.bench.statistics import BootstrapInterval, bounds

__all__ = [
    "Cell",
    "Table",
    "TableRow",
    "category_table",
    "full_table",
    "headline_table",
    "latency_table",
    "longform_table",
    "quality_table",
    "speed_table",
]  # fmt: skip


class Cell(NamedTuple):
    """Content of a cell, its tooltip, and its type: a number (""), a "word" or a "bar"."""

    text: str | Markup
    title: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TableRow:
    """Cells of one arm; ``note`` is shown below its name."""

    style: ArmStyle
    cells: Sequence[Cell]
    note: str = ""
    bad: bool = False
    best: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``head``: (title, tooltip) of each column after the arm's. ``bars``: the last column has bars."""

    caption: str
    head: Sequence[tuple[str, str]]
    rows: Sequence[TableRow]
    bars: bool = False
    missing: Sequence[str] = field(default=())


def _cell(of: Any, show: Callable[[Any], str] = number) -> Cell:
    found = interval(of)
    if found is None:
        return Cell(NONE)
    title = f"{show(found[1])} to {show(found[2])}" if None not in found else ""
    return Cell(show(found[0]), title)


def _with_interval(of: BootstrapInterval | None, show: Callable[[Any], str] = number) -> Cell:
    if of is None:
        return Cell(NONE)
    if None in of:
        return Cell(show(of[0]), "no interval")
    ends = f"{show(of[1])} – {show(of[2])}".replace("×", "")
    return Cell(Markup("{} <small>{}</small>").format(show(of[0]), ends))


def _exact(lossless: Any) -> Cell:
    return Cell("exact" if lossless is True else "lossy" if lossless is False else "not known", kind="word")


def _drift(summary: Summary) -> Cell:
    return Cell("0", "exact") if summary.get("lossless") is True else _cell(drift_of(summary), drift)


def _row(run: Digest, summary: Summary, cells: Sequence[Cell], best: bool = False) -> TableRow:
    error = run.failed.get(summary["arm"])
    return TableRow(
        run.styles[summary["arm"]], cells, f"failed: {error}" if error else "", error is not None, best
    )


# --- the tables ------------------------------------------------------------------------------------------------------
def headline_table(run: Digest, temperature: float) -> Table:
    """Every arm at one temperature: speed over all and each suite, target calls, drift."""
    rows = [row for row in headline(run.results) if row["temperature"] in (temperature, None)]
    suites = [suite for suite in run.suites if any(suite in row["speed_by_suite"] for row in rows)]
    show = multiple if run.base else number
    what = f"speed over {run.base}" if run.base else "tokens a second"
    head = [
        (suite, f"{what}, {'all suites' if suite == 'all' else suite}; 95 % interval") for suite in suites
    ]
    head += [
        ("drift", "mean TV(π, p): how far the law of a token is from the target's"),
        ("calls / token", "target calls a new token"),
        ("tokens/s", "new tokens a second, prefill included"),
        ("law", "exact: texts follow the target's law"),
    ]
    shown = []
    for row in rows:
        speeds = [interval(row["speed_by_suite"].get(suite)) for suite in suites]
        first = _with_interval(speeds[0], show) if speeds else Cell(NONE)
        rest = [_cell(speed, show) for speed in speeds[1:]]
        others = [
            _drift(row),
            _cell(row["target_calls_per_token"]),
            _cell(row["tokens_per_s"]),
            _exact(row["lossless"]),
        ]
        shown.append(_row(run, row, [*([first] if suites else []), *rest, *others], row["front"]))
    return Table(f"All arms at temperature {temperature:g}: {what}", head, shown)


def speed_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Bars with intervals, fastest first."""
    base = run.base
    shown = [(summary, speed_of(summary, base)) for summary in summaries]
    there = [(summary, speed) for summary, speed in shown if speed is not None]
    there.sort(key=lambda item: -item[1][0])
    most = max((bounds(speed)[1] for _, speed in there), default=1.0)
    show, mark = (multiple, 1.0) if base else (number, None)
    rows = [
        _row(run, s, [_with_interval(speed, show), _bar(run.styles[s["arm"]].colour, speed, most, mark)])
        for s, speed in there
    ]
    missing = [summary["arm"] for summary, speed in shown if speed is None]
    title = f"speed over {base}" if base else "tokens a second"
    head = ("speed-up" if base else "tokens/s", f"{title}, with its 95 % interval")
    return Table(title, [head, ("", "")], rows, True, missing)


def _bar(colour: str, speed: BootstrapInterval, most: float, one: float | None) -> Cell:
    middle, low, high = (100 * max(0.0, each) / most for each in (speed[0], *bounds(speed)))
    parts = [("fill " + colour, 0.0, middle), ("interval", low, max(0.3, high - low))]
    if one is not None and one < most:
        parts.append(("one", 100 * one / most, 0.0))
    return _track(parts)


def _track(parts: Sequence[tuple[str, float, float]]) -> Cell:
    """A cell of bars: class, left end and width in per cent of each."""
    bar = Markup('<i class="{}" style="left:{:.2f}%;width:{:.2f}%"></i>')
    bars = Markup("").join(bar.format(*part) for part in parts)
    return Cell(Markup('<span class="track" aria-hidden="true">{}</span>').format(bars), kind="bar")


def latency_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Median and 95th percentile of the time to the first token and between tokens."""
    there = [s for s in summaries if any(s.get(key) for key in ("ttft_ms", "gap_ms"))]
    most = {
        key: max((_at(s, key, "p95") or 0.0 for s in there), default=0.0) or 1.0
        for key in ("ttft_ms", "gap_ms")
    }
    rows = []
    for summary in sorted(there, key=lambda s: _at(s, "gap_ms", "p95") or 0.0):
        cells = []
        for key in ("ttft_ms", "gap_ms"):
            cells += [_cell(_at(summary, key, "p50")), _cell(_at(summary, key, "p95"))]
            cells.append(_span(run.styles[summary["arm"]].colour, summary, key, most[key]))
        rows.append(_row(run, summary, cells))
    head = [
        ("first token p50", "time to the first token, ms, median"),
        ("p95", "time to the first token, ms, 95th percentile"),
        ("", ""),
        ("between p50", "time between tokens, ms, median; 0 where a round gives several tokens at once"),
        ("p95", "time between tokens, ms, 95th percentile"),
        ("", ""),
    ]
    missing = [summary["arm"] for summary in summaries if summary not in there]
    return Table("latency in milliseconds", head, rows, missing=missing)


def _at(summary: Summary, key: str, level: str) -> float | None:
    return value((summary.get(key) or {}).get(level))


def _span(colour: str, summary: Summary, key: str, most: float) -> Cell:
    """A bar from p50 to p95."""
    low, high = (_at(summary, key, level) for level in ("p50", "p95"))
    if low is None or high is None:
        return Cell("", kind="bar")
    left, right = 100 * low / most, 100 * high / most
    return _track([("fill " + colour, left, max(0.8, right - left))])


_FULL: Sequence[tuple[str, str, str, Callable[[Any], str]]] = (
    ("tokens_per_s", "tokens/s", "new tokens a second, prefill included", number),
    ("target_calls_per_token", "calls / token", "target calls a new token", number),
    ("draft_steps_per_token", "draft steps / token", "draft steps a new token", number),
    ("tokens_per_round", "tokens / round", "new tokens a round (target call)", number),
    ("accepted_of_checked", "accepted", "of the draft tokens that the target judged", percentage),
    ("drift_coverage", "metered", "share of new tokens whose drift was measured", percentage),
    ("drafted_share", "from draft", "share of new tokens that the draft wrote", percentage),
    ("trusted_share", "trusted", "share of new tokens kept without asking the target", percentage),
    ("prompts", "prompts", "prompts that every arm answered", count),
    ("new_tokens", "new tokens", "in all answers", count),
)


def full_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Every number of a summary except latency and quality."""
    head = [("law", "exact: texts follow the target's law")]
    head += [(f"over {base}", f"speed over {base}; 95 % interval") for base in run.bases]
    head += [("drift", "mean TV(π, p)"), *((title, hint) for _, title, hint, _ in _FULL)]
    rows = []
    for summary in summaries:
        cells = [_exact(summary.get("lossless"))]
        cells += [_with_interval(speed_of(summary, base), multiple) for base in run.bases]
        cells += [_drift(summary), *(_cell(summary.get(key), show) for key, _, _, show in _FULL)]
        rows.append(_row(run, summary, cells))
    return Table("every arm", head, rows)


def quality_table(run: Digest, summaries: Sequence[Summary]) -> Table | None:
    """Main quality measures with intervals; None if nothing was measured."""
    shown = {
        name for s in summaries for name, of in (s.get("quality") or {}).items() if value(of) is not None
    }
    names = [name for name in METRICS if name in shown and METRICS[name].main] + sorted(
        shown - METRICS.keys()
    )
    if not names:
        return None
    arrows = {"higher": "\u00a0↑", "lower": "\u00a0↓"}
    head = []
    for name in names:
        metric = METRICS.get(name)
        better = arrows.get(metric.better or "", "") if metric else ""
        head.append((f"{name.replace('_', ' ')}{better}", metric.meaning if metric else name))
    rows = [
        _row(run, s, [_with_interval(interval((s.get("quality") or {}).get(name))) for name in names])
        for s in summaries
    ]
    return Table("quality of the answers (↑ higher is better, ↓ lower is better)", head, rows)


def longform_table(run: Digest, found: LongForm) -> Table:
    """Speed by position for every arm."""
    shown: Mapping[str, Sequence[Any]] = found.speed_up or found.tokens_per_s
    show = multiple if found.speed_up else number
    ends = list(zip(found.edges, found.edges[1:], strict=False))
    head = [(f"{start:,}–{end:,}", f"tokens {start:,} to {end:,} of the context") for start, end in ends]
    rows = [_row(run, {"arm": arm}, [_cell(of, show) for of in bins]) for arm, bins in shown.items()]
    what = f"speed over {run.base}" if found.speed_up else "tokens a second"
    return Table(f"{what} by position in the context", head, rows)


def category_table(run: Digest, found: Categories) -> Table:
    """Speed-up by category for every arm."""
    head = [(name, f"speed over {run.base} on {name}") for name in found.names]
    rows = [
        _row(run, {"arm": arm}, [_cell(shown.get(name), multiple) for name in found.names])
        for arm, shown in found.speed_up.items()
    ]
    return Table(f"speed over {run.base} by category", head, rows)
