"""Figures of the pair's laws: SVIP's Figures 2 to 4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from sprinter.bench.report.numbers import number, percentage, value
from sprinter.bench.report.pictures import BarPart
from sprinter.bench.report.svg import Axis, Plot, axis, tag
from sprinter.theory.bounds import entropy_bound

__all__ = ["law_parts"]

_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
Analysis = Mapping[str, Any]


def law_parts(analysis: Analysis | None) -> dict[str, BarPart]:
    """Figures by title; ``sprinter.bench.analysis`` describes the data."""
    if not analysis:
        return {}
    return {
        "Entropy of the draft against acceptance": _entropy(analysis),
        "Entropy ratio": _ratio(analysis["ratio"]),
        "Bounds on acceptance against the truth": _bounds(analysis["bounds"]),
    }


def _entropy(analysis: Analysis) -> BarPart:
    found = analysis["entropy"]
    edges = found["edges"]
    if len(edges) < 3:
        return BarPart(None, ["too few positions"])
    x = axis([], "H(q), nats →", low=edges[0], high=edges[-1])
    y = Axis(0.0, 1.0, "↑ acceptance rate β = 1 − TV(p, q)", _SHARES)
    top = Plot(x, y, "Acceptance rate against the draft's entropy.", height=240)
    _spread(top, edges, found["overlap"], found["count"], "blue", "β")
    h = [edges[-1] * i / 100 for i in range(101)]
    bound = entropy_bound(0.0).new_tensor(h)
    c = analysis["bounds"]["c"]
    estimate = [(a, b) for a, b in zip(h, entropy_bound(bound, c).tolist(), strict=True) if b >= 0]
    top.line(estimate, "red", dash="6 4", width=1.6)
    most = max((v for v in found["length"]["p90"] if v is not None), default=1.0)
    length = axis([], "↑ tokens accepted in a row", low=0.0, high=1.05 * most)
    bottom = Plot(x, length, "Accepted length against the draft's entropy.", height=240)
    _spread(bottom, edges, found["length"], None, "green", "length")
    correlation = analysis.get("entropy_overlap_correlation")
    notes = [
        f"Line: mean; bands: the middle half and the middle four fifths of positions. Dashed: SVIP's 1 − √(cH), "
        f"c = {c:g}. Correlation of H and β: {number(correlation)}. Runs are "
        f"followed for up to {analysis.get('cap')} tokens.",
    ]
    return BarPart(tag("div", top.html(), bottom.html(), class_="pair"), notes)


def _spread(
    plot: Plot,
    edges: Sequence[float],
    found: Mapping[str, Any],
    counts: Sequence[int] | None,
    colour: str,
    name: str,
) -> None:
    """Mean and bands by bin."""
    there = [i for i, mean in enumerate(found["mean"]) if value(mean) is not None]
    centre = {i: (edges[i] + edges[i + 1]) / 2 for i in there}
    for low, high in (("p10", "p90"), ("p25", "p75")):
        plot.band(
            [(centre[i], found[low][i]) for i in there], [(centre[i], found[high][i]) for i in there], colour
        )
    plot.line([(centre[i], found["mean"][i]) for i in there], colour, width=2)
    for i in there:
        of = f" of {counts[i]:,} positions" if counts else ""
        tip = f"H {edges[i]:g} to {edges[i + 1]:g} nats\nmean {name} {number(found['mean'][i])}{of}"
        plot.dot(centre[i], found["mean"][i], colour, tip)


def _ratio(found: Mapping[str, Any]) -> BarPart:
    total = sum(found["count"]) + found["above"]
    if not total:
        return BarPart(None, ["the draft was sure everywhere"])
    last = max((i for i, n in enumerate(found["count"]) if n), default=0) + 1
    edges, shares = found["edges"][: last + 1], [n / total for n in found["count"][:last]]
    x = axis([], "H(q, p) / H(q) →", low=edges[0], high=edges[-1])
    y = axis(shares, "↑ share of positions", low=0.0)
    plot = Plot(x, y, f"Histogram of the entropy ratio, median {number(found['p50'])}.", height=240)
    for i, share in enumerate(shares):
        if share:
            tip = f"{edges[i]:g} to {edges[i + 1]:g}\n{percentage(share)} of {total:,} positions"
            plot.bar(edges[i], edges[i + 1], share, "sky", tip)
    plot.rule(found["p50"], f"median {number(found['p50'])}")
    notes = [
        f"{percentage(found['share_to_1_3'])} of positions lie between 1 and 1.3, where SVIP found most of its own; "
        f"{percentage(found['above'] / total)} lie above {found['edges'][-1]:g}. Left out, the draft being sure: "
        f"{found['left_out']:,}."
    ]
    return BarPart(plot.html(), notes)


_LINES = (
    ("pinsker", "Pinsker", "blue", None),
    ("bretagnolle_huber", "Bretagnolle-Huber", "green", "2 3"),
    ("entropy", "SVIP's stand-in", "red", "6 4"),
)


def _bounds(found: Mapping[str, Any]) -> BarPart:
    share = found["share"]
    if len(share) < 2:
        return BarPart(None, ["too few positions"])
    x = Axis(0.0, 1.0, "positions in the order of their β →", _SHARES)
    y = Axis(0.0, 1.0, "↑ acceptance rate", _SHARES)
    plot = Plot(
        x, y, "Acceptance rate and its lower bounds at positions in the order of the truth.", height=280
    )
    truth = [each if value(each) is not None else 0.0 for each in found["truth"]]
    for key, name, colour, dash in _LINES:
        points = [(at, each) for at, each in zip(share, found[key], strict=True) if value(each) is not None]
        plot.line([(at, max(0.0, each)) for at, each in points], colour, dash=dash, width=1.6)
        for at, each in points[4::8]:
            plot.dot(at, max(0.0, each), colour, f"{name}: {number(each)}")
    plot.line(list(zip(share, truth, strict=True)), "ink", width=2.4)
    for at, each in list(zip(share, truth, strict=True))[4::8]:
        plot.dot(at, each, "ink", f"truth: {number(each)}")
    names = [("truth β", "ink", None), *((name, colour, dash) for _, name, colour, dash in _LINES)]
    broken = found["violations"]
    notes = [
        "Means over hundredths of the positions; what is below 0 is drawn at 0. Above the truth: "
        + ", ".join(f"{name} at {percentage(broken.get(key))}" for key, name, _, _ in _LINES)
        + " of positions (the stand-in is no bound).",
    ]
    return BarPart(tag("div", plot.html(), legend(names), class_="single"), notes)


def legend(names: Sequence[tuple[str, str, str | None]]) -> Markup:
    """Legend: lines with their meaning."""
    entries = [
        tag("li", tag("svg", tag("line", x1=0, x2=26, y1=6, y2=6, class_=f"line {colour}", stroke_width=2.4,
                                 stroke_dasharray=dash), width=26, height=12, aria_hidden="true"), f" {name}")
        for name, colour, dash in names
    ]  # fmt: skip
    return tag("ul", *entries, class_="legend")
