"""Pictures of a run: speed and drift, dials, tokens per round, acceptance by position, long texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from sprinter.bench.analysis import acceptance_by_position
from sprinter.bench.report.breakdown import Dial, LongForm, allocation_line, dials, ends, quality_of
from sprinter.bench.report.digest import Digest, SuiteView, Summary, drift_of, front, plane_points, speed_of
from sprinter.bench.report.drawing import HALF, WIDE, XY, PagePart, Picture
from sprinter.bench.report.numbers import drift, interval, multiple, number, percentage, value
from sprinter.bench.statistics import BootstrapInterval, bounds
from sprinter.plots import COLOURS, mark

__all__ = ["acceptance", "dial_pictures", "longform_picture", "plane", "range_text", "rounds", "tip_of"]

_ROW = 16
"""Height of an exact arm's row, in pixels."""
_PLACES = 20
_MOST = 21
"""Number of tokens per round from which histograms have a single bin."""
_NO_DRAFTS = ("draft-only", "allocation")
"""Methods without rounds, whose drafts are whole texts."""
_LEAST_ROUNDS = 20


def range_text(of: BootstrapInterval | None, show: Callable[[Any], str] = number) -> str:
    """Value and interval as text: 1.62× (1.55× to 1.70×)."""
    if of is None:
        return "not known"
    return show(of[0]) if None in of else f"{show(of[0])} ({show(of[1])} to {show(of[2])})"


def tip_of(run: Digest, summary: Summary) -> str:
    """Text of a mark's tooltip."""
    speed, far = speed_of(summary, run.base), drift_of(summary)
    exact = summary.get("lossless") is True
    lines = [
        str(summary["arm"]),
        f"{range_text(speed, multiple)} the speed of {run.base}" if run.base and speed else "",
        f"{number(summary.get('tokens_per_s'))} tokens/s",
        "exact: the target's law" if exact else f"drift {range_text(far, drift)}",
        f"{number(summary.get('target_calls_per_token'))} target calls a token",
    ]
    return "\n".join(line for line in lines if line and "–" not in line)


def _speed_label(base: str | None) -> str:
    return f"speed, in multiples of {base}" if base else "tokens a second"


def _name(what: str, view: SuiteView) -> str:
    return f"{what}; {view[0]}, temperature {view[1]:g}"


# --- speed and drift -------------------------------------------------------------------------------------------------
def plane(run: Digest, summaries: Sequence[Summary], view: SuiteView) -> PagePart:
    """Speed (horizontal) against drift (vertical) with the front, and below it the exact arms, a row each."""
    points = plane_points(summaries, run.base)
    shown = [summary for summary in summaries if summary["arm"] in points]
    if not shown:
        return PagePart(None, ["no arm knows both its speed and its drift"])
    best = front(points)
    exact = sorted((s for s in shown if s.get("lossless") is True), key=lambda s: points[s["arm"]])
    lossy = sorted((s for s in shown if s.get("lossless") is not True), key=lambda s: s["arm"] not in best)
    heights = [320.0] * bool(lossy) + [_ROW * len(exact) + 8.0] * bool(exact)
    label = "mean drift TV(π, p), less is nearer to the target" if lossy else "exact arms, drift 0"
    picture = Picture(WIDE, heights, _speed_label(run.base), label)
    upper, lower = picture.panels[0], picture.panels[-1]
    speeds = {s["arm"]: speed_of(s, run.base) for s in shown}
    lower.speed_axis([end for of in speeds.values() if of for end in (of[0], *bounds(of))])
    for s in lossy:
        style = run.styles[s["arm"]]
        upper.arm(points[s["arm"]], style, tip_of(run, s), style.label, speeds[s["arm"]], drift_of(s))
    if lossy:
        upper.line([*_steps([points[arm] for arm in best])], "ink", ls=(0, (4, 3)), lw=1.2)
        highest = max((bounds(far)[1] for s in lossy if (far := drift_of(s))), default=0.0)
        upper.ax.set_ylim(0, 1.06 * highest or 0.1)
    for row, s in enumerate(exact):
        style = run.styles[s["arm"]]
        lower.arm((points[s["arm"]][0], row), style, tip_of(run, s), style.label, speeds[s["arm"]])
    if exact:
        lower.ax.set(ylim=(len(exact) - 0.4, -0.6), yticks=[])
        if lossy:
            lower.ax.text(0.006, 0.02, "exact: drift 0", transform=lower.ax.transAxes, color=COLOURS["grey"])
    missing = [summary["arm"] for summary in summaries if summary["arm"] not in points]
    notes = ["Dashed: the front. What lies on it is beaten by no arm in both speed and drift."]
    if missing:
        notes.append(f"Not drawn, since speed or drift is not known: {', '.join(missing)}.")
    told = "; ".join(f"{arm} {number(points[arm][0])} at drift {drift(points[arm][1])}" for arm in best)
    name = _name(f"Speed against drift of {len(points)} arms. On the front: {told}", view)
    return PagePart(picture.html(name), notes)


def _steps(points: Sequence[XY]) -> Iterator[XY]:
    """A staircase up through points: right along the drift of each, up to that of the next."""
    for at, after in zip(points, [*points[1:], points[-1]], strict=True):
        yield at
        yield after[0], at[1]


# --- dials -----------------------------------------------------------------------------------------------------------
Measure = Callable[[Summary], BootstrapInterval | None]


def dial_pictures(run: Digest, summaries: Sequence[Summary], view: SuiteView) -> PagePart:
    """Drift, and a quality, against speed for several values of each dial."""
    found = dials(run, summaries)
    if not found:
        return PagePart(None, ["no lossy method ran at two places of its dial"])
    measures: list[tuple[str, Measure]] = [("mean drift TV(π, p)", drift_of)]
    if (quality := quality_of(summaries)) is not None:
        measures.append((quality[1], lambda s: interval((s.get("quality") or {}).get(quality[0]))))
    both = ends(run, summaries)
    pictures = [
        _dial_picture(run, both or (), found, measure, label, WIDE if quality is None else HALF).html(
            _name(f"{label} against speed for {', '.join(dial.name for dial in found)}", view)
        )
        for label, measure in measures
    ]
    notes = ["Each curve is one method, each mark one place of its dial; hover or tap to read it."]
    notes.append(
        "Dotted: a growing share of whole texts given to the draft alone, at random. A dial worth having stays on the "
        "better side of it."
        if both
        else "No line for random allocation: it needs the arms autoregressive and draft-only."
    )
    return PagePart(Markup('<div class="pair">{}</div>').format(Markup("").join(pictures)), notes)


def _dial_picture(
    run: Digest, both: Sequence[Summary], found: Sequence[Dial], measure: Measure, label: str, width: float
) -> Picture:
    def at(summary: Summary) -> XY | None:
        x, y = value(speed_of(summary, run.base)), value(measure(summary))
        return None if x is None or y is None else (x, y)

    picture = Picture(width, [300], _speed_label(run.base), label, 46)
    (panel,) = picture.panels
    curves = [(dial, [(s, place) for _, s in dial.points if (place := at(s))]) for dial in found]
    corners = [(each, place) for each in both if (place := at(each))]
    panel.speed_axis([x for _, points in (*curves, (None, corners)) for _, (x, _) in points] or [1.0])
    for each, place in corners:
        panel.arm(place, run.styles[each["arm"]], tip_of(run, each), run.styles[each["arm"]].label)
    if len(corners) == 2:
        panel.line(allocation_line(corners[0][1], corners[1][1]), "grey", ls=":", lw=1.6)
    for dial, points in curves:
        if points:
            panel.line([place for _, place in points], dial.style, label=dial.name, lw=1.8)
        for summary, place in points:
            panel.arm(place, run.styles[summary["arm"]], tip_of(run, summary))
    panel.ax.autoscale_view()
    if measure is drift_of:
        panel.ax.set_ylim(bottom=0)
    return picture


# --- rounds ----------------------------------------------------------------------------------------------------------
def rounds(run: Digest, summaries: Sequence[Summary], view: SuiteView) -> PagePart:
    """A histogram of tokens per round for each arm, all over one horizontal axis."""
    shown = [s for s in summaries if len(counts := s.get("round_histogram") or []) > 2 and sum(counts[1:])]
    if not shown:
        return PagePart(None, ["no arm reported how many tokens its rounds added"])
    most = min(_MOST, max(len(s["round_histogram"]) for s in shown) - 1)
    picture = Picture(WIDE, [26 * len(shown)], "tokens a round", "share of rounds", 220)
    ax, names = picture.panels[0].ax, []
    for row, summary in enumerate(shown):
        style, counts = run.styles[summary["arm"]], list(summary["round_histogram"])
        counts = [*counts[:most], sum(counts[most:])]
        total, high, mean = sum(counts), max(counts[1:]), number(summary.get("tokens_per_round"))
        tops = [row - 0.85 * n / high for n in counts[1:]]
        shares = ", ".join(f"{k}: {percentage(n / total)}" for k, n in enumerate(counts) if k and n)
        edges = np.arange(len(tops) + 1) + 0.5
        bars = ax.stairs(tops, edges, baseline=row, fill=True, color=COLOURS[style.colour])
        mark(bars, style.index, f"{style.name}\n{total:,} rounds, mean {mean} tokens\n{shares}")
        names.append(f"{style.label} · {mean}")
    ax.set(xlim=(0.5, most + 0.5), ylim=(len(shown) - 0.9, -1), xticks=_whole(most))
    ax.set_yticks(range(len(shown)), names, va="bottom", color=COLOURS["ink"])
    ax.grid(False, axis="y")
    rest = [s["arm"] for s in summaries if s not in shown]
    notes = [
        f"Share of rounds that added 1 to {most} tokens (or more); the height is each arm's own. Beside the name: the "
        "mean."
    ]
    if rest:
        notes.append(f"Left out, one token a round or not known: {', '.join(rest)}.")
    return PagePart(picture.html(_name("Tokens a round of each arm", view)), notes)


def acceptance(
    run: Digest, summaries: Sequence[Summary], view: SuiteView, laws: Mapping[str, Any] | None
) -> PagePart:
    """Acceptance rate of draft tokens by position in the draft, for the fastest arm of each method."""
    best: dict[str, tuple[Summary, list[float]]] = {}
    for summary in sorted(summaries, key=lambda s: value(s.get("tokens_per_s")) or 0):
        places = acceptance_by_position(summary.get("round_histogram") or [])
        there = sum(reached >= _LEAST_ROUNDS for reached in places["reached"])
        kept = places["kept"][: min(there, _PLACES)]
        method = run.styles[summary["arm"]].method
        if len(kept) > 1 and method not in _NO_DRAFTS:
            best[method] = (summary, kept)
    law = (laws or {}).get("kept", [])[:_PLACES]
    if not best and not law:
        return PagePart(None, ["no arm reported how many tokens its rounds added"])
    picture = Picture(WIDE, [340], "place in the draft", "kept, of drafts that got there")
    (panel,) = picture.panels
    if law:
        panel.line([*enumerate(law, 1)], "ink", label="from the laws", ls="--", lw=2)
    for summary, kept in best.values():
        style, points = run.styles[summary["arm"]], [*enumerate(kept, 1)]
        panel.line(points, style, label=style.label, lw=1.3)
        panel.dots([(at, f"{style.label}\nplace {at[0]}: {percentage(at[1])}") for at in points], style)
    longest = max(map(len, [law, *(kept for _, kept in best.values())]))
    least = min([*law, *(share for _, kept in best.values() for share in kept)])
    bottom = min(0.8, int(10 * least) / 10)
    panel.ax.set(xlim=(0.5, 1.12 * longest + 0.5), ylim=(bottom, 1.0), xticks=_whole(longest))
    notes = [
        f"The fastest arm of each method; places that at least {_LEAST_ROUNDS} drafts reached. A draft that a stop "
        "rule ended counts as not kept at its end."
    ]
    if law:
        notes.append(
            "Dashed: what the two models' laws give for exact acceptance of a draft begun anywhere in a text."
        )
    name = _name(f"Acceptance by place in the draft for {', '.join(best)}", view)
    return PagePart(picture.html(name), notes)


def _whole(most: int) -> list[int]:
    return list(range(1, most + 1, 1 if most <= 10 else 2))


# --- long texts ------------------------------------------------------------------------------------------------------
def longform_picture(run: Digest, found: LongForm, view: SuiteView) -> PagePart:
    """Speed against the position in the context, for the fastest arm of each kind and the base."""
    over = bool(found.speed_up)
    shown: Mapping[str, Sequence[Any]] = found.speed_up if over else found.tokens_per_s
    centres = [(low + high) / 2 for low, high in zip(found.edges, found.edges[1:], strict=False)]
    bins = {
        arm: [(at, of) for at, each in zip(centres, found, strict=True) if (of := interval(each)) is not None]
        for arm, found in shown.items()
    }
    best: dict[str, str] = {}
    for arm in sorted(bins, key=lambda arm: np.mean([of[0] for _, of in bins[arm]] or [0.0])):
        if bins[arm]:
            best[run.styles[arm].kind] = arm
    y = _speed_label(run.base if over else None)
    picture = Picture(WIDE, [300], "position in the context, tokens", y)
    (panel,) = picture.panels
    for arm in best.values():
        style, places = run.styles[arm], [at for at, _ in bins[arm]]
        low, high = zip(*(bounds(of) for _, of in bins[arm]), strict=True)
        panel.ax.fill_between(places, low, high, color=COLOURS[style.colour], alpha=0.14, lw=0)
        panel.line([(at, of[0]) for at, of in bins[arm]], style, label=style.label, lw=1.8)
        for at, of in bins[arm]:
            told = range_text(of, multiple if over else number)
            panel.arm((at, of[0]), style, f"{arm}\nabout token {at:.0f}: {told}")
    panel.ax.autoscale_view()
    panel.ax.set(xlim=(found.edges[0], 1.12 * found.edges[-1]), xticks=found.edges)
    panel.ax.set_ylim(bottom=0)
    name = _name(f"Speed against position for {', '.join(best.values())}", view)
    notes = ["The fastest arm of each kind; the table below has all. Bands: 95 % intervals."]
    return PagePart(picture.html(name), notes)
