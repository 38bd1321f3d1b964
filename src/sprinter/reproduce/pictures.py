"""Curves of a paper's figure, measured again: kept with the results, drawn as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sprinter.plots import COLOURS, canvas, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PaperPicture"]

_LINES = [("blue", "-"), ("orange", "--"), ("green", "-."), ("grey", ":")]


@dataclass(frozen=True, slots=True)
class PaperPicture:
    """Lines in panels.

    Attributes:
        name: of its file, after what all files of a page begin with.
        says: what it shows.
        across, up: what the axes are.
        panels: title -> label of a line -> its points, x and y.
    """

    name: str
    says: str
    across: str
    up: str
    panels: Mapping[str, Mapping[str, Sequence[Sequence[float]]]]

    def markdown(self, before: str) -> str:
        """The picture in a page."""
        return f"![{self.says}]({before}-{self.name}.png)"

    def png(self) -> bytes:
        """Content of its file.

        Raises:
            UserError: matplotlib is not installed.
        """
        return png(self._figure)

    def _figure(self) -> Figure:
        figure, panels = canvas(8, 3.6, 1, len(self.panels), sharex=True, sharey=True)
        for panel, (title, lines) in zip(panels, self.panels.items(), strict=True):
            for (colour, style), (label, (x, y)) in zip(_LINES, lines.items(), strict=False):
                panel.plot(x, y, style, color=COLOURS[colour], linewidth=1.4, label=label)
            panel.plot([0, 1], [0, 1], color=COLOURS["grey"], linewidth=0.6)
            panel.set(title=title, xlabel=self.across, xlim=(0, 1), ylim=(0, 1.01))
            panel.legend(loc="lower right")
        panels[0].set_ylabel(self.up)
        return figure
