"""What the report's pictures share: panels of a size in pixels, arms' marks with intervals, labels that find room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from sprinter.bench.report.arm_style import ArmStyle
from sprinter.bench.statistics import BootstrapInterval, bounds
from sprinter.plots import COLOURS, mark, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HALF", "WIDE", "XY", "PagePart", "Panel", "Picture"]

WIDE, HALF = 820, 430
"""Widths in pixels of a single picture, and of one of two beside each other."""
_TOP, _BOTTOM, _RIGHT = 32, 40, 14
_LOG_FROM = 5
"""Speeds that differ by more than this factor are on a logarithmic axis."""
_SPOTS = (*product((1, -1), (0, 9, -9, 18, -18)), (0, 14), (0, -14))
"""Places of a label: right (1) or left (−1) of its mark, above or below; pixels up."""
XY = tuple[float, float]


class PagePart(NamedTuple):
    """A picture or table with notes below it, or a sentence that says why there is none."""

    body: Markup | None
    notes: Sequence[str] = ()


class Panel:
    """matplotlib's axes, and what their labels must not cover."""

    def __init__(self, ax: Axes) -> None:
        self.ax = ax
        self._labels: list[tuple[XY, XY, str, ArmStyle | None]] = []
        self._lines: list[Sequence[XY]] = []

    def line(
        self, points: Sequence[XY], of: ArmStyle | str, *, tip: str = "", label: str = "", **look: Any
    ) -> None:
        """A line, or one mark, of an arm or of a colour by name, with a tooltip and a label at its end.

        Args:
            look: properties of ``Line2D``.
        """
        from matplotlib.lines import Line2D

        style = of if isinstance(of, ArmStyle) else None
        colour = COLOURS[of if isinstance(of, str) else of.colour]
        made = Line2D(*zip(*points, strict=True), **{"color": colour, **look})  # faster than ``plot``
        self.ax.add_line(made)
        mark(made, style.index if style else None, tip)
        self._lines.append(points)
        if label:
            self._labels.append((points[-1], points[-1], label, style))

    def dots(self, points: Iterable[tuple[XY, str]], of: ArmStyle | str) -> None:
        """Small marks on a line, each with its tooltip."""
        for at, tip in points:
            self.line([at], of, tip=tip, marker="o", ms=5, ls="", clip_on=False)

    def arm(
        self,
        at: XY,
        style: ArmStyle,
        tip: str,
        label: str = "",
        across: BootstrapInterval | None = None,
        up: BootstrapInterval | None = None,
    ) -> None:
        """An arm's mark with its tooltip, its intervals in both directions, and a label beside them."""
        (x, y), faint = at, (COLOURS[style.colour], 0.5)
        (left, right), (low, high) = (bounds(of) if of else (own, own) for of, own in ((across, x), (up, y)))
        for one, other in (((left, y), (right, y)), ((x, low), (x, high))):
            if one != other:
                self.line([one, other], style, color=faint, lw=1)
        look: dict[str, Any] = {
            "marker": style.marker,
            "ms": 8,
            "ls": "",
            "mec": COLOURS["paper"],
            "mew": 0.8,
            "zorder": 4,
        }
        self.line([at], style, tip=tip, **look)
        if label:
            self._labels.append(((left, y), (right, y), label, style))

    def speed_axis(self, speeds: Sequence[float]) -> None:
        """Make the horizontal axis one for these speeds."""
        from matplotlib.ticker import LogLocator, NullLocator

        least, most = min(speeds), max(speeds)
        if least > 0 and most > _LOG_FROM * least:
            self.ax.set_xscale("log")
            subs = (1, 1.5, 2, 3, 5, 7) if most < 20 * least else (1, 2, 5)
            self.ax.xaxis.set_major_locator(LogLocator(subs=subs))
            self.ax.xaxis.set_minor_locator(NullLocator())
            self.ax.xaxis.set_major_formatter("{x:g}")

    def write_labels(self) -> None:
        """Write each label where it covers nothing, else across lines, else not at all; the first ones choose first."""
        from matplotlib.transforms import Bbox

        self.ax.autoscale_view()
        pixels = self.ax.transData.transform
        marks = [_around(at) for points in self._lines if len(points) == 1 for at in pixels(points)]
        across = [
            _around(at, 2)
            for points in self._lines
            for a, b in pairwise(pixels(points))
            for at in np.linspace(a, b, 12)
        ]
        inside = self.ax.bbox
        for left, right, text, style in self._labels:
            written = self.ax.annotate(text, left, (0, 0), textcoords="offset points", va="center", zorder=5)
            width, height = written.get_window_extent().size
            (start, y), (end, _) = pixels((left, right))
            for taken, (side, up) in product(([*marks, *across], marks), _SPOTS):
                gap = 9 - abs(up) / 6
                x = {1: end + gap, -1: start - gap - width, 0: (start + end - width) / 2}[side]
                box = Bbox.from_bounds(x, y + up - height / 2 + 1, width, height - 2)
                fits = inside.x0 <= x <= inside.x1 + _RIGHT - width and inside.y0 < box.y0 < inside.y1 - 7
                if fits and not box.count_overlaps(taken):
                    written.set_position((x - start, up))
                    mark(written, style.index if style else None)
                    marks.append(box)
                    break
            else:
                written.remove()


def _around(at: Any, half: float = 6) -> Any:
    from matplotlib.transforms import Bbox

    return Bbox.from_extents(*(at - half), *(at + half))


class Picture:
    """Panels one below the other over one horizontal axis.

    Args:
        width, heights: of the picture and of its panels, in pixels; axes' texts come on top of the heights.
        left: room for the texts of the vertical axis.
    """

    def __init__(self, width: float, heights: Sequence[float], x: str, y: str, left: float = 40) -> None:
        from matplotlib.figure import Figure

        height = sum(heights) + _TOP + _BOTTOM
        self._figure = Figure(figsize=(width / 72, height / 72))
        edges = left / width, _BOTTOM / height, 1 - _RIGHT / width, 1 - _TOP / height
        self._figure.subplots_adjust(*edges, hspace=0)
        axes = self._figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        axes[0].set_title(f"↑ {y}", x=-(left - 6) / (width - left - _RIGHT))
        axes[-1].set_xlabel(f"{x} →")
        self.panels = [Panel(ax) for ax in axes]

    def html(self, name: str) -> Markup:
        """The picture with its labels, in a box that scrolls where there is no room for it; ``name``: as in ``svg``."""
        for panel in self.panels:
            panel.write_labels()
        return Markup('<div class="scrolled">{}</div>').format(Markup(svg(self._figure, name)))
