"""How pictures look, with matplotlib (extra ``plots``): one palette and style, PNG files, and SVG for HTML pages."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from sprinter.errors import UserError, install_line

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "STYLE",
    "canvas",
    "check_plots",
    "few_colours",
    "mark",
    "no_plots",
    "page_style",
    "png",
    "svg",
]

COLOURS = {
    "blue": "#0072b2", "sky": "#56b4e9", "orange": "#e69f00", "green": "#009e73", "red": "#d55e00",
    "purple": "#cc79a7", "grey": "#767676", "ink": "#222222", "grid": "#e8e8e8", "paper": "#ffffff",
}  # fmt: skip
"""Okabe and Ito's palette, which is safe for colour-blind readers, and neutral tones. In a page each name is a custom
property of CSS (``--blue``), so that a dark page has its own."""
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": COLOURS["ink"], "figure.facecolor": COLOURS["paper"],
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": COLOURS["grey"],
    "axes.labelcolor": COLOURS["ink"], "axes.titlesize": 9.5, "axes.titlelocation": "left",
    "xtick.color": COLOURS["ink"], "ytick.color": COLOURS["ink"], "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
"""matplotlib's parameters for pictures in PNG files."""
_PAGE: Any = STYLE | {
    "font.size": 11, "legend.fontsize": 11, "axes.titlesize": 11, "axes.titlepad": 11,
    **dict.fromkeys(("axes.titlecolor", "axes.labelcolor", "xtick.color", "ytick.color"), COLOURS["grey"]),
    "axes.grid": True, "axes.axisbelow": True, "grid.color": COLOURS["grid"], "axes.spines.left": False,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "xaxis.labellocation": "right",
    "figure.dpi": 72, "svg.fonttype": "none", "text.parse_math": False,
}  # fmt: skip


def no_plots() -> str | None:
    """Why no picture can be drawn, with the command that helps; None: matplotlib is installed."""
    return f"pictures need matplotlib: {install_line('plots')}" if find_spec("matplotlib") is None else None


def check_plots(otherwise: str) -> None:
    """Raise a UserError if matplotlib is not installed; ``otherwise``: what to do without it."""
    if (reason := no_plots()) is not None:
        raise UserError(f"{reason}, or {otherwise}")


def canvas(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row.

    Args:
        width, height: in inches.
        options: of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def png(draw: Callable[[], Figure], dpi: int = 120) -> bytes:
    """Draw a picture as the content of a PNG file.

    Raises:
        UserError: matplotlib is not installed.
    """
    check_plots("leave them out")
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        draw().savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return few_colours(file.getvalue())


def few_colours(picture: bytes) -> bytes:
    """A PNG file of charts or pages with a palette of 64 colours, a third as large."""
    from PIL import Image  # matplotlib needs it too

    made = io.BytesIO()
    few = Image.open(io.BytesIO(picture)).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    few.save(made, format="png", optimize=True)
    return made.getvalue()


def mark(artist: Artist, group: int | None = None, tip: str = "") -> None:
    """For ``svg``: the group of a mark, whose marks a page shows together (``data-arm``), and its tooltip."""
    artist.set_gid(f"{'' if group is None else group}|{tip}".replace("\n", _BREAK))


_BREAK = "\u2028"  # a line break that XML keeps in attributes
_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_NAMES = {code: name for name, code in COLOURS.items()}


def page_style() -> AbstractContextManager[object]:
    """The style of figures that become ``svg``; they are made, and drawn, inside."""
    if no_plots():
        return nullcontext()
    import matplotlib

    return matplotlib.rc_context(_PAGE)


def svg(figure: Figure, name: str) -> str:
    """A picture as an element of a page, with the page's colours and font, as wide as it finds room.

    Args:
        figure: made in ``page_style``; 1/72 inch is a pixel of CSS.
        name: text for screen readers, unique in the page, because the ids in the picture are derived from it.
    """
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a browser has more fonts
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(_NO_XML.sub("", file.getvalue()))
    for element in list(root.iter()):
        _simplify(element)
    width, height = (72 * inches for inches in figure.get_size_inches())
    root.attrib = {
        "class": "area", "role": "img", "aria-label": name, "viewBox": f"0 0 {width:g} {height:g}",
        "style": f"min-width:{0.8 * width:g}px;max-width:{1.3 * width:g}px",
    }  # fmt: skip
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _simplify(element: ElementTree.Element) -> None:
    """Name colours, round numbers, drop matplotlib's names and style, and turn what ``mark`` left into its form."""
    element.tag = element.tag.rpartition("}")[2]
    for child in list(element):
        if child.tag.endswith(("metadata", "style")) or (child.tag.endswith("}g") and not len(child)):
            element.remove(child)
    found, element.attrib = element.attrib, {}
    element.text, element.tail = (
        text if text and text.strip() else None for text in (element.text, element.tail)
    )
    for key, value in found.items():
        if key == "style":
            value = re.sub("#[0-9a-f]{6}", lambda code: f"var(--{_NAMES[code[0]]})", value)
            value = re.sub(r"font-size: 11px; |font-family:[^;]*; |; stroke-linecap: square", "", value)
            value = value.replace(": ", ":").replace("; ", ";")
        elif key in ("d", "x", "y", "width", "height", "transform"):
            value = " ".join(re.sub(r"(\.\d)\d+|\.0\b", r"\1", value).split())
        if value.startswith("rotate(-0"):
            continue
        if key != "id" or element.tag != "g":
            element.set(key.rpartition("}")[2], value)
            continue
        group, marked, tip = value.partition("|")
        if marked and group:
            element.set("data-arm", group)
        if tip:
            element.set("class", "tip")
            title = ElementTree.Element("title")
            title.text = tip.replace(_BREAK, "\n")
            element.insert(0, title)
