"""Pictures of the pair's laws, SVIP's Figures 2 to 4, from the data of ``sprinter.bench.analysis``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from sprinter.bench.report.drawing import HALF, WIDE, PagePart, Picture
from sprinter.bench.report.numbers import number, percentage, value
from sprinter.plots import COLOURS, mark

__all__ = ["LAW_PICTURES"]

Analysis = Mapping[str, Any]


def _entropy(analysis: Analysis) -> PagePart:
    found, c = analysis["entropy"], analysis["bounds"]["c"]
    edges = found["edges"]
    if len(edges) < 3:
        return PagePart(None, ["too few positions"])
    left = _spread(edges, found["overlap"], found["count"], "blue", "β", "acceptance rate β = 1 − TV(p, q)")
    h = np.linspace(0, edges[-1], 101)
    left.panels[0].line([*zip(h, 1 - np.sqrt(c * h), strict=True)], "red", ls="--", lw=1.6)
    left.panels[0].ax.set_ylim(0, 1)
    right = _spread(edges, found["length"], None, "green", "length", "tokens accepted in a row")
    right.panels[0].ax.set_ylim(bottom=0)
    notes = [
        f"Line: mean; bands: the middle half and the middle four fifths of positions. Dashed: SVIP's 1 − √(cH), "
        f"c = {c:g}. Correlation of H and β: {number(analysis.get('entropy_overlap_correlation'))}. Runs are "
        f"followed for up to {analysis.get('cap')} tokens."
    ]
    pictures = left.html("Acceptance rate against the draft's entropy")
    pictures += right.html("Accepted length against the draft's entropy")
    return _titled("Entropy of the draft against acceptance", pictures, notes)


def _spread(
    edges: Sequence[float],
    found: Mapping[str, Any],
    counts: Sequence[int] | None,
    colour: str,
    name: str,
    y: str,
) -> Picture:
    """Mean and bands by bin of the draft's entropy."""
    picture = Picture(HALF, [240], "H(q), nats", y)
    (panel,) = picture.panels
    there = [i for i, mean in enumerate(found["mean"]) if value(mean) is not None]
    centres = [(edges[i] + edges[i + 1]) / 2 for i in there]
    for low, high in (("p10", "p90"), ("p25", "p75")):
        bottom, top = ([found[end][i] for i in there] for end in (low, high))
        panel.ax.fill_between(centres, bottom, top, color=COLOURS[colour], alpha=0.14, lw=0)
    points = [*zip(centres, (found["mean"][i] for i in there), strict=True)]
    panel.line(points, colour, lw=2)
    tips = [
        f"H {edges[i]:g} to {edges[i + 1]:g} nats\nmean {name} {number(found['mean'][i])}"
        + (f" of {counts[i]:,} positions" if counts else "")
        for i in there
    ]
    panel.dots(zip(points, tips, strict=True), colour)
    panel.ax.autoscale_view()
    panel.ax.set_xlim(edges[0], edges[-1])
    return picture


def _ratio(analysis: Analysis) -> PagePart:
    found = analysis["ratio"]
    total = sum(found["count"]) + found["above"]
    if not total:
        return PagePart(None, ["the draft was sure everywhere"])
    picture = Picture(WIDE, [240], "H(q, p) / H(q)", "share of positions")
    ax = picture.panels[0].ax
    last = max((i for i, n in enumerate(found["count"]) if n), default=0) + 1
    edges, shares = found["edges"], [n / total for n in found["count"][:last]]
    for low, high, share in zip(edges, edges[1:], shares, strict=False):
        bar = ax.bar(low, share, 0.96 * (high - low), align="edge", color=COLOURS["sky"])[0]
        mark(bar, tip=f"{low:g} to {high:g}\n{percentage(share)} of {total:,} positions")
    median = f"median {number(found['p50'])}"
    ax.axvline(found["p50"], color=COLOURS["grey"], ls=":")
    ax.annotate(median, (found["p50"], 0.94), (5, 0), ("data", "axes fraction"), "offset points")
    ax.set(xlim=(edges[0], edges[last]), ylim=(0, 1.12 * max(shares) or 1.0))
    notes = [
        f"{percentage(found['share_to_1_3'])} of positions lie between 1 and 1.3, where SVIP found most of its own; "
        f"{percentage(found['above'] / total)} lie above {edges[-1]:g}. Left out, the draft being sure: "
        f"{found['left_out']:,}."
    ]
    return _titled("Entropy ratio", picture.html(f"Histogram of the entropy ratio, {median}"), notes)


_LINES = (
    ("truth", "truth β", "ink", "-", 2.4),
    ("pinsker", "Pinsker", "blue", "-", 1.6),
    ("bretagnolle_huber", "Bretagnolle-Huber", "green", ":", 1.6),
    ("entropy", "SVIP's stand-in", "red", "--", 1.6),
)


def _bounds(analysis: Analysis) -> PagePart:
    found = analysis["bounds"]
    if len(found["share"]) < 2:
        return PagePart(None, ["too few positions"])
    picture = Picture(WIDE, [280], "positions in the order of their β", "acceptance rate")
    (panel,) = picture.panels
    for key, name, colour, dashes, width in _LINES:
        both = zip(found["share"], found[key], strict=True)
        points = [(at, max(0.0, of)) for at, of in both if value(of) is not None]
        panel.line(points, colour, ls=dashes, lw=width)
        panel.ax.lines[-1].set_label(name)
        panel.dots([(at, f"{name}: {number(at[1])}") for at in points[4::8]], colour)
    panel.ax.set(xlim=(0, 1), ylim=(0, 1))
    panel.ax.legend(loc="lower right")
    notes = [
        "Means over hundredths of the positions; what is below 0 is drawn at 0. Above the truth: "
        + ", ".join(f"{name} at {percentage(found['violations'].get(key))}" for key, name, *_ in _LINES[1:])
        + " of positions (the stand-in is no bound)."
    ]
    name = "Acceptance rate and its lower bounds at positions in the order of the truth"
    return _titled("Bounds on acceptance against the truth", picture.html(name), notes)


def _titled(title: str, pictures: Markup, notes: Sequence[str]) -> PagePart:
    return PagePart(Markup('<h3>{}</h3><div class="pair">{}</div>').format(title, pictures), notes)


LAW_PICTURES = (_entropy, _ratio, _bounds)
"""Functions from the analysis of a run to a picture with its title."""
