"""Tables of the report page, some with bars in their cells."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from sprinter.bench.quality.metrics import METRICS
from sprinter.bench.report.arm_style import ArmStyle
from sprinter.bench.report.breakdown import LongForm
from sprinter.bench.report.digest import Digest, Summary, drift_of, front, plane_points, speed_of
from sprinter.bench.report.numbers import NONE, count, drift, interval, multiple, number, percentage, value
from sprinter.bench.statistics import BootstrapInterval, bounds

__all__ = ["Table", "category_table", "full_table", "headline_table", "latency_table", "longform_table",
           "quality_table", "speed_table"]  # fmt: skip


class Cell(NamedTuple):
    """Content of a cell, its tooltip, and its type: a number (""), a "word" or a "bar"."""

    text: str | Markup
    title: str = ""
    kind: str = ""


Column = tuple[str, str, Callable[[Summary], Cell]]
"""Title, tooltip, and the cell of an arm's summary."""


class TableRow(NamedTuple):
    """Cells of one arm; ``failed``: a line below its name; ``best``: it is on the front."""

    style: ArmStyle
    cells: Sequence[Cell]
    failed: str
    best: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A table. ``head``: (title, tooltip) of each column after the arm's. ``bars``: the last column has bars."""

    caption: str
    head: Sequence[tuple[str, str]]
    rows: Sequence[TableRow]
    bars: bool = False
    missing: Sequence[str] = ()


def _table(
    run: Digest, caption: str, summaries: Iterable[Summary], columns: Sequence[Column], *, best: Collection[str] = (),
    bars: bool = False, missing: Sequence[str] = (),
) -> Table:  # fmt: skip
    rows = [
        TableRow(
            run.styles[s["arm"]],
            [cell(s) for _, _, cell in columns],
            f"failed: {run.failed[s['arm']]}" if s["arm"] in run.failed else "",
            s["arm"] in best,
        )
        for s in summaries
    ]
    return Table(caption, [(title, hint) for title, hint, _ in columns], rows, bars, missing)


# --- cells -----------------------------------------------------------------------------------------------------------
def _cell(of: Any, show: Callable[[Any], str] = number) -> Cell:
    found = interval(of)
    if found is None:
        return Cell(NONE)
    return Cell(show(found[0]), f"{show(found[1])} to {show(found[2])}" if None not in found else "")


def _with_interval(of: BootstrapInterval | None, show: Callable[[Any], str] = number) -> Cell:
    if of is None or None in of:
        return Cell(NONE) if of is None else Cell(show(of[0]), "no interval")
    ends = f"{show(of[1])} – {show(of[2])}".replace("×", "")
    return Cell(Markup("{} <small>{}</small>").format(show(of[0]), ends))


def _track(parts: Sequence[tuple[str, float, float]]) -> Cell:
    """A cell of bars: class, left end and width in per cent of each."""
    bar = Markup('<i class="{}" style="left:{:.2f}%;width:{:.2f}%"></i>')
    bars = Markup("").join(bar.format(*part) for part in parts)
    return Cell(Markup('<span class="track" aria-hidden="true">{}</span>').format(bars), kind="bar")


def _law(summary: Summary) -> Cell:
    lossless = summary.get("lossless")
    return Cell("exact" if lossless is True else "lossy" if lossless is False else "not known", kind="word")


_LAW: Column = ("law", "exact: texts follow the target's law", _law)
_DRIFT: Column = (
    "drift",
    "mean TV(π, p): how far the law of a token is from the target's",
    lambda s: Cell("0", "exact") if s.get("lossless") is True else _cell(drift_of(s), drift),
)


def _column(key: str, title: str, hint: str, show: Callable[[Any], str] = number) -> Column:
    return title, hint, lambda s: _cell(s.get(key), show)


def _measure(run: Digest) -> tuple[str, Callable[[Any], str]]:
    return (f"speed over {run.base}", multiple) if run.base else ("tokens a second", number)


# --- the tables ------------------------------------------------------------------------------------------------------
_FULL: Sequence[tuple[str, str, str, Callable[[Any], str]]] = (
    ("tokens_per_s", "tokens/s", "new tokens a second, prefill included", number),
    ("target_calls_per_token", "calls / token", "target calls a new token", number),
    ("draft_steps_per_token", "draft steps / token", "draft steps a new token", number),
    ("tokens_per_round", "tokens / round", "new tokens a round (target call)", number),
    ("accepted_of_checked", "accepted", "of the draft tokens that the target judged", percentage),
    ("drift_coverage", "metered", "share of new tokens whose drift was measured", percentage),
    ("drafted_share", "from draft", "share of new tokens that the draft wrote", percentage),
    ("trusted_share", "trusted", "share of new tokens kept without asking the target", percentage),
    ("round_trips_per_token", "round trips / token", "requests to the target's server a new token", number),
    ("bytes_per_token", "bytes / token", "sent and received a new token", count),
    ("paid_per_token", "paid / token", "tokens that the target's server read, a new token", number),
    ("prompts", "prompts", "prompts that every arm answered", count),
    ("new_tokens", "new tokens", "in all answers", count),
)
_REMOTE = ("round_trips_per_token", "bytes_per_token", "paid_per_token")


def headline_table(run: Digest, temperature: float) -> Table:
    """Every arm at one temperature, fastest first: speed over all and each suite, target calls, drift."""
    found = {suite: run.views.get((suite, temperature)) for suite in run.suites}
    views = {suite: {s["arm"]: s for s in summaries} for suite, summaries in found.items() if summaries}
    what, show = _measure(run)
    first = next(iter(views.values()))

    def row(arm: str) -> Summary:
        """Of an arm without a summary over all suites only its numbers by suite are known."""
        some = next((found[arm] for found in views.values() if arm in found), {})
        return first.get(arm) or {"arm": arm, "lossless": some.get("lossless")}

    def speed(suite: str) -> Column:
        show_first = _with_interval if views[suite] is first else _cell
        hint = f"{what}, {'all suites' if suite == 'all' else suite}; 95 % interval"
        return suite, hint, lambda s: show_first(speed_of(views[suite].get(s["arm"], {}), run.base), show)

    rows = sorted((row(arm["name"]) for arm in run.arms), key=lambda s: -(value(speed_of(s, run.base)) or 0))
    columns = [*map(speed, views), _DRIFT, *(_column(*each) for each in (_FULL[1], _FULL[0])), _LAW]
    best = front(plane_points(list(first.values()), run.base))
    return _table(run, f"All arms at temperature {temperature:g}: {what}", rows, columns, best=best)


def speed_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Bars with intervals, fastest first."""
    speeds = {s["arm"]: speed for s in summaries if (speed := speed_of(s, run.base)) is not None}
    most = max((bounds(speed)[1] for speed in speeds.values()), default=1.0)
    what, show = _measure(run)

    def bar(s: Summary) -> Cell:
        speed = speeds[s["arm"]]
        middle, low, high = (100 * max(0.0, each) / most for each in (speed[0], *bounds(speed)))
        parts = [
            (f"fill {run.styles[s['arm']].colour}", 0.0, middle),
            ("interval", low, max(0.3, high - low)),
        ]
        return _track([*parts, ("one", 100 / most, 0.0)] if run.base and most > 1 else parts)

    title = "speed-up" if run.base else "tokens/s"
    head = (title, f"{what}, with its 95 % interval", lambda s: _with_interval(speeds[s["arm"]], show))
    shown = sorted((s for s in summaries if s["arm"] in speeds), key=lambda s: -speeds[s["arm"]][0])
    missing = [s["arm"] for s in summaries if s["arm"] not in speeds]
    return _table(run, what, shown, [head, ("", "", bar)], bars=True, missing=missing)


def latency_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Median and 95th percentile of the time to the first token and between tokens, with bars between them."""
    there = [s for s in summaries if s.get("ttft_ms") or s.get("gap_ms")]

    def at(s: Summary, key: str, level: str) -> float | None:
        return value((s.get(key) or {}).get(level))

    def columns(key: str, title: str, what: str, note: str = "") -> list[Column]:
        most = max((at(s, key, "p95") or 0.0 for s in there), default=0.0) or 1.0

        def bar(s: Summary) -> Cell:
            low, high = (at(s, key, level) for level in ("p50", "p95"))
            if low is None or high is None:
                return Cell("", kind="bar")
            left, width = 100 * low / most, 100 * (high - low) / most
            return _track([(f"fill {run.styles[s['arm']].colour}", left, max(0.8, width))])

        return [
            (f"{title} p50", f"{what}, ms, median{note}", lambda s: _cell(at(s, key, "p50"))),
            ("p95", f"{what}, ms, 95th percentile", lambda s: _cell(at(s, key, "p95"))),
            ("", "", bar),
        ]

    first = columns("ttft_ms", "first token", "time to the first token")
    note = "; 0 where a round gives several tokens at once"
    both = [*first, *columns("gap_ms", "between", "time between tokens", note)]
    missing = [summary["arm"] for summary in summaries if summary not in there]
    there.sort(key=lambda s: at(s, "gap_ms", "p95") or 0.0)
    return _table(run, "latency in milliseconds", there, both, missing=missing)


def full_table(run: Digest, summaries: Sequence[Summary]) -> Table:
    """Every number of a summary except latency and quality."""

    def over(base: str) -> Column:
        hint = f"speed over {base}; 95 % interval"
        return f"over {base}", hint, lambda s: _with_interval(speed_of(s, base), multiple)

    remote = any(s.get("round_trips_per_token") for s in summaries)
    full = [each for each in _FULL if remote or each[0] not in _REMOTE]
    columns = [_LAW, *map(over, run.bases), _DRIFT, *(_column(*each) for each in full)]
    return _table(run, "every arm", summaries, columns)


def quality_table(run: Digest, summaries: Sequence[Summary]) -> Table | None:
    """Main quality measures with intervals; None if nothing was measured."""
    qualities = {s["arm"]: s.get("quality") or {} for s in summaries}
    shown = {name for found in qualities.values() for name, of in found.items() if value(of) is not None}
    names = [name for name in METRICS if name in shown and METRICS[name].main] + sorted(
        shown - METRICS.keys()
    )
    arrows = {"higher": "\u00a0↑", "lower": "\u00a0↓"}

    def column(name: str) -> Column:
        metric = METRICS.get(name)
        title = name.replace("_", " ") + (arrows.get(metric.better or "", "") if metric else "")
        hint = metric.meaning if metric else name
        return title, hint, lambda s: _with_interval(interval(qualities[s["arm"]].get(name)))

    caption = "quality of the answers (↑ higher is better, ↓ lower is better)"
    return _table(run, caption, summaries, [column(name) for name in names]) if names else None


def longform_table(run: Digest, found: LongForm) -> Table:
    """Speed by position for every arm."""
    shown: Mapping[str, Sequence[Any]] = found.speed_up or found.tokens_per_s
    what, show = _measure(run) if found.speed_up else ("tokens a second", number)

    def column(i: int) -> Column:
        start, end = found.edges[i : i + 2]
        hint = f"tokens {start:,} to {end:,} of the context"
        return f"{start:,}–{end:,}", hint, lambda s: _cell(shown[s["arm"]][i], show)

    columns = [column(i) for i in range(len(found.edges) - 1)]
    return _table(run, f"{what} by position in the context", ({"arm": arm} for arm in shown), columns)


def category_table(run: Digest, speed_up: Mapping[str, Mapping[str, BootstrapInterval]]) -> Table:
    """Speed-up by category for every arm: ``speed_up[arm][category]``."""

    def column(name: str) -> Column:
        hint = f"speed over {run.base} on {name}"
        return name, hint, lambda s: _cell(speed_up[s["arm"]].get(name), multiple)

    names = dict.fromkeys(name for shown in speed_up.values() for name in shown)
    caption = f"speed over {run.base} by category"
    return _table(run, caption, ({"arm": arm} for arm in speed_up), [column(name) for name in names])
