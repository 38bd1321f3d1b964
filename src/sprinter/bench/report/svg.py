"""SVG figures for any width: horizontal positions are shares of the width, vertical positions and text are pixels.

So a figure is drawn once, its text stays legible on a phone, and its colours follow the page's light or dark scheme.
Lines are drawn in an inner SVG that is stretched (``vector-effect`` keeps their width).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from markupsafe import Markup, escape

from sprinter.bench.report.label_layout import PlacedLabel, Taken, place
from sprinter.bench.report.looks import Look
from sprinter.bench.report.numbers import number

__all__ = ["HALF", "WIDE", "Axis", "Plot", "axis", "tag"]

WIDE, HALF, _NARROW = 850, 386, 280
"""Minimum widths in pixels, without axis and margins, that labels are laid out for: a single figure, one of two figures
side by side in a window of 960 pixels or more, and any figure on a phone. The style sheet shows the labels that fit."""
_UNITS = 1000
"""Width of the stretched inner SVG."""


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Make an element; values are escaped, ``class_`` is "class", other "_" become "-", None omits an attribute."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(each))}"'
        for key, each in attributes.items()
        if each is not None
    )
    inside = "".join(escape(child) for child in children)
    return Markup(f"<{name}{shown}>{inside}</{name}>")


def _plain(each: object) -> object:
    return f"{each:.5g}" if isinstance(each, float) else each


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        low, high: ends of the range.
        label: quantity with its unit.
        ticks: values with tick marks.
        log: whether the scale is logarithmic.
    """

    low: float
    high: float
    label: str
    ticks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Position of a value, 0 at the low end and 1 at the high one; values outside are clamped."""
        low, high, at = (self._scaled(each) for each in (self.low, self.high, value))
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log(max(value, self.low)) if self.log else value


def axis(
    values: Sequence[float],
    label: str,
    *,
    low: float | None = None,
    high: float | None = None,
    log: bool = False,
) -> Axis:
    """Make an axis that includes all values, with about five ticks.

    Args:
        low, high: fixed ends; None: chosen.
        log: logarithmic scale; all values must be positive.
    """
    least = min(values, default=0.0) if low is None else low
    most = max(values, default=1.0) if high is None else high
    if not most > least:
        least, most = (least / 1.5, 1.5 * least) if log else (least - 0.5, least + 0.5)
    if log:
        room = (most / least) ** 0.04
        least, most = least / room, most * room
        return Axis(least, most, label, _powers(least, most), True)
    room = 0.04 * (most - least)
    least, most = least - (room if low is None else 0), most + (room if high is None else 0)
    step = _step((most - least) / 5)
    first, last = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    return Axis(least, most, label, [step * i for i in range(first, last + 1)])


def _step(rough: float) -> float:
    power = 10 ** math.floor(math.log10(rough))
    return float(next(nice * power for nice in (1, 2, 2.5, 5, 10) if nice * power >= rough * 0.999))


def _powers(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 1.5, 2, 3, 5, 7) if high < 20 * low else (1, 2, 5)
    return [round(nice * 10.0**n, 12) for n in exponents for nice in digits if low <= nice * 10.0**n <= high]


class Plot:
    """One figure; its methods draw in the order of their calls.

    Args:
        x, y: axes.
        name: text for screen readers.
        height: height of the plot area in pixels.
        lane: pixels below the area for marks that have no place on the y axis.
        lane_label: label of the lane.
        wide: minimum width of the area in a wide window, ``WIDE`` or ``HALF``.
    """

    def __init__(
        self, x: Axis, y: Axis, name: str, *, height: int = 280, lane: int = 0, lane_label: str = "", wide: int = WIDE
    ) -> None:  # fmt: skip
        self.x, self.y, self.name, self.height = x, y, name, height
        self.lane, self._lane_label, self._wide = lane, lane_label, wide
        self._lines: list[Markup] = []
        self._marks: list[Markup] = []
        self._labels: list[PlacedLabel] = []
        self._taken: list[Taken] = []

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, dash: str | None = None, width: float = 1.8,
        steps: bool = False, index: int | None = None,
    ) -> None:  # fmt: skip
        """A line through points; ``steps``: a step function."""
        if steps:
            corners = [(right[0], left[1]) for left, right in pairwise(points)]
            points = [point for pair in zip_longest(points, corners) for point in pair if point is not None]
        for start, end in pairwise(points):
            self._avoid(start, end)
        self._lines.append(
            tag("polyline", points=self._points(points), class_=f"line {colour}", stroke_width=width,
                stroke_dasharray=dash, data_arm=index)
        )  # fmt: skip

    def band(
        self, low: Sequence[tuple[float, float]], high: Sequence[tuple[float, float]], colour: str
    ) -> None:
        """A filled band between two lines."""
        self._lines.append(
            tag("polygon", points=self._points([*low, *reversed(high)]), class_=f"band {colour}")
        )

    def bar(self, left: float, right: float, top: float, colour: str, tip: str) -> None:
        """A bar from the bottom to ``top``."""
        start, end, y = self._units(left), self._units(right), self._down(top)
        gap = min(1.5, (end - start) / 6)
        self._lines.append(
            tag("rect", tag("title", tip), x=start + gap, width=end - start - 2 * gap, y=y, height=self.height - y,
                class_=f"bar tip {colour}")
        )  # fmt: skip

    def rule(self, x: float, text: str) -> None:
        """A thin vertical line with a label."""
        at, bottom = self._units(x), self.height + self.lane
        self._lines.append(tag("line", class_="rule", x1=at, x2=at, y1=0, y2=bottom))
        self._marks.append(tag("text", text, class_="note", x=self._percent(x), y=0, dx=4, dy=10))

    def mark(
        self, x: float, y: float | None, look: Look, tip: str, *, row: float = 0, label: str = "", urgency: int = 0
    ) -> None:  # fmt: skip
        """A mark with a tooltip. ``y`` None: in the lane, ``row`` pixels down. Urgent labels are placed first."""
        down = self._down(y) if y is not None else self.height + row
        at = self._percent(x)
        hit = tag("circle", cx=at, cy=down, r=11, class_="hit")
        drawn = tag("use", href=f"#a{look.index}", x=at, y=down)
        self._marks.append(tag("g", tag("title", tip), hit, drawn, class_="tip", data_arm=look.index))
        self._taken.append(Taken(self.x.share(x), down, 6.0))
        if label:
            self._labels.append(PlacedLabel(self.x.share(x), down, label, urgency, look.index))

    def dot(self, x: float, y: float, colour: str, tip: str, index: int | None = None) -> None:
        """A point on a line, with a tooltip."""
        self._marks.append(
            tag("circle", tag("title", tip), cx=self._percent(x), cy=self._down(y), r=2.6, class_=f"dot tip {colour}",
                data_arm=index)
        )  # fmt: skip

    def whisker(self, start: tuple[float, float], end: tuple[float, float], colour: str, index: int) -> None:
        """A thin line between two points, for an interval."""
        points = self._points([start, end])
        self._lines.append(tag("polyline", points=points, class_=f"whisker {colour}", data_arm=index))

    def text(self, x: float, y: float, label: str, index: int, urgency: int = 0) -> None:
        """A label near a point, placed where it fits."""
        self._labels.append(PlacedLabel(self.x.share(x), self._down(y), label, urgency, index))

    def html(self) -> Markup:
        """The figure with its axes."""
        whole = self.height + self.lane
        lines = tag("svg", *self._lines, viewBox=f"0 0 {_UNITS} {whole}", preserveAspectRatio="none", width="100%",
                    height=whole)  # fmt: skip
        labels = [*self._placed(self._wide, "at-wide"), *self._placed(_NARROW, "at-narrow")]
        picture = tag("svg", *self._grid(), lines, *self._marks, *labels, role="img", aria_label=self.name,
                      class_="area", height=whole, width="100%")  # fmt: skip
        return tag(
            "div",
            tag("p", self.y.label, class_="y-label"),
            picture,
            tag("p", self.x.label, class_="x-label"),
            class_="plot",
        )

    def _grid(self) -> list[Markup]:
        parts = []
        for tick in self.y.ticks:
            y = self._down(tick)
            parts.append(tag("line", x1=0, x2="100%", y1=y, y2=y, class_="grid"))
            parts.append(tag("text", _tick(tick), x=0, dx=-7, y=y, dy=4, class_="tick", text_anchor="end"))
        bottom = self.height + self.lane
        for tick in self.x.ticks:
            at = self._percent(tick)
            parts.append(tag("line", x1=at, x2=at, y1=0, y2=bottom, class_="grid"))
            parts.append(tag("text", _tick(tick), x=at, y=bottom, dy=17, class_="tick", text_anchor="middle"))
        if self.lane:
            parts.append(tag("rect", x=0, width="100%", y=self.height, height=self.lane, class_="lane"))
            parts.append(tag("text", self._lane_label, class_="note", x=6, y=bottom, dy=-6))
        parts.append(tag("line", x1=0, x2="100%", y1=self.height, y2=self.height, class_="base"))
        return parts

    def _placed(self, width: int, which: str) -> list[Markup]:
        """Labels that fit at this width."""
        foot, note = self.height + self.lane - 10.0, range(0, 7 * len(self._lane_label), 7)
        taken = [*self._taken, *(Taken(x / width, foot, 6.0) for x in note)]
        return [
            tag("text", label.text, x=f"{100 * label.x:.2f}%", y=label.y, dx=dx, dy=dy, text_anchor=side,
                class_=f"label {which}", data_arm=label.arm)
            for label, (dx, dy, side) in place(self._labels, taken, width, self.height + self.lane)
        ]  # fmt: skip

    def _avoid(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Keep labels off a line."""
        (x, y), (right, down) = ((self.x.share(a), self._down(b)) for a, b in (start, end))
        steps = max(1, round(max(self._wide * abs(right - x), abs(down - y)) / 8))
        for i in range(steps + 1):
            self._taken.append(Taken(x + (right - x) * i / steps, y + (down - y) * i / steps, 1.0))

    def _points(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self._units(x):.1f},{self._down(y):.1f}" for x, y in points)

    def _units(self, x: float) -> float:
        return _UNITS * self.x.share(x)

    def _percent(self, x: float) -> str:
        return f"{100 * self.x.share(x):.2f}%"

    def _down(self, y: float) -> float:
        return self.height * (1 - self.y.share(y))


def _tick(value: float) -> str:
    return f"{round(value, 10):g}".replace("-", "−") if abs(value) < 10_000 else number(value)
