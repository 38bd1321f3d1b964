"""Figures of a run: speed and drift, dials, tokens per round, acceptance by position, long texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from sprinter.bench.analysis import acceptance_by_position
from sprinter.bench.report.breakdown import LongForm
from sprinter.bench.report.dials import Dial, allocation_line, dials, ends, quality_of
from sprinter.bench.report.digest import Digest, Summary, drift_of, front, plane_points, speed_of
from sprinter.bench.report.label_layout import lane_rows
from sprinter.bench.report.numbers import drift, interval, multiple, number, percentage, value
from sprinter.bench.report.svg import HALF, WIDE, Axis, Plot, axis, tag
from sprinter.bench.statistics import BootstrapInterval, bounds

__all__ = [
    "BarPart",
    "acceptance",
    "dial_pictures",
    "longform_picture",
    "plane",
    "range_text",
    "rounds",
    "tip_of",
]

_LANE_ROW = 15
_BY_RATIO = 5
"""If speeds differ by more than this factor the axis is logarithmic."""
_PLACES = 20
_MOST = 21
"""Number of tokens per round from which histograms have a single bin."""
_NO_DRAFTS = ("draft-only", "allocation")
"""Methods without rounds, whose drafts are whole texts."""
_LEAST_ROUNDS = 20


class BarPart(NamedTuple):
    """A figure or table with notes below it, or a sentence that says why there is none."""

    body: Markup | None
    notes: Sequence[str] = ()


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
        "exact: the target's law"
        if exact
        else f"drift {range_text(far, drift)}"
        if far
        else "drift not known",
        f"{number(summary.get('target_calls_per_token'))} target calls a token",
    ]
    return "\n".join(line for line in lines if line and "–" not in line)


def _speed_label(base: str | None) -> str:
    return f"speed, in multiples of {base} →" if base else "tokens a second →"


def _speed_axis(run: Digest, speeds: Sequence[float]) -> Axis:
    wide = min(speeds, default=0.0) > 0 and max(speeds) > _BY_RATIO * min(speeds)
    return axis(speeds, _speed_label(run.base), log=wide)


# --- speed and drift -------------------------------------------------------------------------------------------------
def plane(run: Digest, summaries: Sequence[Summary]) -> BarPart:
    """Speed (horizontal) against drift (vertical), exact arms in a separate lane, and the front."""
    points = plane_points(summaries, run.base)
    shown = [summary for summary in summaries if summary["arm"] in points]
    if not shown:
        return BarPart(None, ["no arm knows both its speed and its drift"])
    exact = [summary for summary in shown if summary.get("lossless") is True]
    lossy = [summary for summary in shown if summary.get("lossless") is not True]
    x = _speed_axis(run, [end for s in shown for end in _span(speed_of(s, run.base))])
    most = max((bounds(far)[1] for s in lossy if (far := drift_of(s))), default=0.0) or 0.1
    y = axis([], "↑ mean drift TV(π, p), less is nearer to the target", low=0.0, high=1.06 * most)
    rows = lane_rows([x.share(points[s["arm"]][0]) for s in exact])
    lane = 44 + _LANE_ROW * max(rows, default=0) if exact else 0
    plot = Plot(x, y, _plane_name(run, points), height=320, lane=lane, lane_label="exact: drift 0")
    line = front(points)
    plot.line([points[arm] for arm in line], "ink", dash="5 4", width=1.3, steps=True)
    for summary in lossy:
        _whiskers(plot, run, summary, points[summary["arm"]])
    for summary, row in [(s, None) for s in lossy] + list(zip(exact, rows, strict=True)):
        arm = summary["arm"]
        look, (across, down) = run.looks[arm], points[arm]
        urgency = 2 * (arm in line) + 3 * (arm == run.base) + (summary.get("lossless") is not True)
        at = {"y": None, "row": 15.0 + _LANE_ROW * row} if row is not None else {"y": down}
        plot.mark(across, look=look, tip=tip_of(run, summary), label=look.label, urgency=urgency, **at)
    missing = [summary["arm"] for summary in summaries if summary["arm"] not in points]
    notes = ["Dashed: the front. What lies on it is beaten by no arm in both speed and drift."]
    if missing:
        notes.append(f"Not drawn, since speed or drift is not known: {', '.join(missing)}.")
    return BarPart(plot.html(), notes)


def _plane_name(run: Digest, points: Mapping[str, tuple[float, float]]) -> str:
    shown = "; ".join(
        f"{arm} {number(points[arm][0])} at drift {drift(points[arm][1])}" for arm in front(points)
    )
    return f"Speed against drift of {len(points)} arms. On the front: {shown}."


def _whiskers(plot: Plot, run: Digest, summary: Summary, at: tuple[float, float]) -> None:
    look, speed, far = run.looks[summary["arm"]], speed_of(summary, run.base), drift_of(summary)
    if speed and None not in speed:
        low, high = bounds(speed)
        plot.whisker((low, at[1]), (high, at[1]), look.colour, look.index)
    if far and None not in far:
        low, high = bounds(far)
        plot.whisker((at[0], low), (at[0], high), look.colour, look.index)


def _span(of: BootstrapInterval | None) -> list[float]:
    """Ends of an interval, which an axis must include."""
    return [] if of is None else [of[0], *bounds(of)]


# --- dials -----------------------------------------------------------------------------------------------------------
def dial_pictures(run: Digest, summaries: Sequence[Summary]) -> BarPart:
    """Drift, and a quality, against speed for several values of each dial."""
    found = dials(run, summaries)
    if not found:
        return BarPart(None, ["no lossy method ran at two places of its dial"])
    quality = quality_of(summaries)
    wide = WIDE if quality is None else HALF
    pictures = [_dial_picture(run, summaries, found, drift_of, "↑ mean drift TV(π, p)", wide)]
    if quality is not None:
        name, label = quality

        def measure(summary: Summary) -> BootstrapInterval | None:
            return interval((summary.get("quality") or {}).get(name))

        pictures.append(_dial_picture(run, summaries, found, measure, f"↑ {label}", wide))
    notes = ["Each curve is one method, each mark one place of its dial; hover or tap to read it."]
    if ends(run, summaries):
        notes.append(
            "Dashed: a growing share of whole texts given to the draft alone, at random. A dial worth having stays on "
            "the better side of it."
        )
    else:
        notes.append("No line for random allocation: it needs the arms autoregressive and draft-only.")
    return BarPart(tag("div", *pictures, class_="pair" if len(pictures) > 1 else "single"), notes)


Measure = Callable[[Summary], BootstrapInterval | None]


def _dial_picture(
    run: Digest, summaries: Sequence[Summary], found: Sequence[Dial], measure: Measure, label: str, wide: int
) -> Markup:
    curves = [
        (dial, [(place, s, at) for place, s in dial.points if (at := _at(run, s, measure)) is not None])
        for dial in found
    ]
    corners = [
        (each, at) for each in ends(run, summaries) or () if (at := _at(run, each, measure)) is not None
    ]
    line = allocation_line(corners[0][1], corners[1][1]) if len(corners) == 2 else []
    everything = [at for _, points in curves for _, _, at in points] + [at for _, at in corners]
    x = _speed_axis(run, [at[0] for at in everything])
    y = axis([at[1] for at in everything], label, low=0.0 if measure is drift_of else None)
    plot = Plot(
        x, y, f"{label.lstrip('↑ ')} against speed for {', '.join(d.name for d in found)}.", height=300
    )
    if line:
        plot.line(line, "grey", dash="3 4", width=1.6)
    for dial, points in curves:
        plot.line([at for _, _, at in points], dial.look.colour, index=dial.look.index)
        for i, (_, summary, at) in enumerate(points):
            look = run.looks[summary["arm"]]
            last = i == len(points) - 1
            plot.mark(*at, look, tip_of(run, summary), label=dial.name if last else "", urgency=2)
    for each, at in corners:
        look = run.looks[each["arm"]]
        plot.mark(*at, look, tip_of(run, each), label=look.label, urgency=3)
    return plot.html()


def _at(run: Digest, summary: Summary, measure: Measure) -> tuple[float, float] | None:
    x, y = value(speed_of(summary, run.base)), value(measure(summary))
    return None if x is None or y is None else (x, y)


# --- rounds ----------------------------------------------------------------------------------------------------------
def rounds(run: Digest, summaries: Sequence[Summary]) -> BarPart:
    """A histogram of tokens per round for each arm, all with the same horizontal scale."""
    shown = [s for s in summaries if sum(s.get("round_histogram") or []) and len(s["round_histogram"]) > 2]
    if not shown:
        return BarPart(None, ["no arm reported how many tokens its rounds added"])
    most = min(_MOST, max(len(s["round_histogram"]) for s in shown) - 1)
    cards = [_card(run, summary, most) for summary in shown]
    rest = [s["arm"] for s in summaries if s not in shown]
    notes = [f"Share of rounds that added 1 to {most} tokens (or more); the height is each arm's own."]
    if rest:
        notes.append(f"Left out, one token a round or not known: {', '.join(rest)}.")
    return BarPart(tag("div", *cards, class_="cards"), notes)


def _card(run: Digest, summary: Summary, most: int) -> Markup:
    look, counts = run.looks[summary["arm"]], list(summary["round_histogram"])
    counts = [*counts[:most], sum(counts[most:])]
    total, high = sum(counts), max(counts[1:])
    tops = [(k, round(46 * n / high, 1)) for k, n in enumerate(counts) if k and n]
    bars = "".join(f"M{10 * k - 9} 48v-{top}h8V48" for k, top in tops)
    shares = ", ".join(f"{k}: {percentage(counts[k] / total)}" for k, _ in tops)
    mean = number(summary.get("tokens_per_round"))
    tip = f"{look.name}\n{total:,} rounds, mean {mean} tokens\n{shares}"
    drawn = tag("path", d=bars, class_=f"shape {look.colour}")
    picture = tag("svg", tag("title", tip), drawn, viewBox=f"0 0 {10 * most} 49", preserveAspectRatio="none",
                  role="img", class_="spark tip")  # fmt: skip
    scale = tag("span", tag("span", "1"), tag("span", str(most)), class_="scale", aria_hidden="true")
    title = tag("span", tag("span", look.label), tag("b", mean), class_="card-head")
    return tag("div", title, picture, scale, class_="card")


def acceptance(run: Digest, summaries: Sequence[Summary], laws: Mapping[str, Any] | None) -> BarPart:
    """Acceptance rate of draft tokens by position in the draft, for the fastest arm of each method."""
    best: dict[str, tuple[Summary, list[float]]] = {}
    for summary in sorted(summaries, key=lambda s: value(s.get("tokens_per_s")) or 0):
        places = acceptance_by_position(summary.get("round_histogram") or [])
        there = sum(reached >= _LEAST_ROUNDS for reached in places["reached"])
        kept = places["kept"][: min(there, _PLACES)]
        method = run.looks[summary["arm"]].method
        if len(kept) > 1 and method not in _NO_DRAFTS:
            best[method] = (summary, kept)
    law = (laws or {}).get("kept", [])[:_PLACES]
    if not best and not law:
        return BarPart(None, ["no arm reported how many tokens its rounds added"])
    longest = max([len(law), *(len(kept) for _, kept in best.values())])
    x = Axis(0.5, longest + 0.5, "place in the draft →", _whole(longest))
    least = min([*law, *(share for _, kept in best.values() for share in kept)])
    y = axis([], "↑ kept, of drafts that got there", low=min(0.8, int(10 * least) / 10), high=1.0)
    plot = Plot(x, y, f"Acceptance by place in the draft for {', '.join(best)}.", height=340)
    for summary, kept in best.values():
        look = run.looks[summary["arm"]]
        points = [(i + 1, share) for i, share in enumerate(kept)]
        plot.line(points, look.colour, width=1.3, index=look.index)
        for i, share in points:
            plot.dot(i, share, look.colour, f"{look.label}\nplace {i}: {percentage(share)}", look.index)
        plot.text(*points[-1], look.label, look.index, 1)
    if law:
        plot.line([(i + 1, share) for i, share in enumerate(law)], "ink", dash="6 4", width=2)
        plot.text(min(3, len(law)), law[min(3, len(law)) - 1], "from the laws", -1, 3)
    notes = [
        f"The fastest arm of each method; places that at least {_LEAST_ROUNDS} drafts reached. A draft that a stop "
        "rule ended counts as not kept at its end."
    ]
    if law:
        notes.append(
            "Dashed: what the two models' laws give for exact acceptance of a draft begun anywhere in a text."
        )
    return BarPart(plot.html(), notes)


def _whole(most: int) -> list[float]:
    step = 1 if most <= 10 else 2
    return [float(i) for i in range(1, most + 1, step)]


# --- long texts ------------------------------------------------------------------------------------------------------
def longform_picture(run: Digest, found: LongForm) -> BarPart:
    """Speed against the position in the context, for the fastest arm of each kind and the base."""
    over = bool(found.speed_up)
    shown: Mapping[str, Sequence[Any]] = found.speed_up if over else found.tokens_per_s
    lines = {arm: _centres(found.edges, each) for arm, each in shown.items()}
    best: dict[str, str] = {}
    for arm, points in sorted(lines.items(), key=lambda item: _mean([at[0] for _, at in item[1]])):
        if points:
            best[run.looks[arm].kind] = arm
    ups = [edge for arm in best.values() for _, at in lines[arm] for edge in _span(at)]
    x = Axis(float(found.edges[0]), float(found.edges[-1]), "position in the context, tokens →", found.edges)
    y = axis(ups, f"↑ {_speed_label(run.base if over else None).rstrip(' →')}", low=0.0)
    plot = Plot(x, y, f"Speed against position for {', '.join(best.values())}.", height=300)
    for arm in best.values():
        look, points = run.looks[arm], lines[arm]
        plot.band(
            [(at, bounds(of)[0]) for at, of in points],
            [(at, bounds(of)[1]) for at, of in points],
            look.colour,
        )
        plot.line([(at, middle) for at, (middle, _, _) in points], look.colour, index=look.index)
        for at, each in points:
            plot.mark(
                at,
                each[0],
                look,
                f"{arm}\nabout token {at:.0f}: {range_text(each, multiple if over else number)}",
            )
        plot.text(points[-1][0], points[-1][1][0], look.label, look.index)
    return BarPart(
        plot.html(), ["The fastest arm of each kind; the table below has all. Bands: 95 % intervals."]
    )


def _centres(edges: Sequence[int], bins: Sequence[Any]) -> list[tuple[float, BootstrapInterval]]:
    return [
        ((edges[i] + edges[i + 1]) / 2, at)
        for i, each in enumerate(bins)
        if (at := interval(each)) is not None
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
