"""Draws the picture of docs/architecture.md and writes the page's list of imports, from the imports as they are.

    python scripts/make_architecture.py

``tests/test_architecture.py`` fails where picture or list differ from the imports. Needs grimp, which comes with
import-linter.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "figures" / "architecture.svg"
Imports = Mapping[str, frozenset[str]]
"""Room → the rooms that it imports. A room is a package or a top-level module, "decode/accept" or "errors"; "sprinter"
is the ``__init__`` of the whole package."""

# Okabe and Ito's palette, as in the other figures
BLUE, ORANGE, SKY, GREEN, RED, PURPLE = "#0072B2", "#B87A00", "#2B8CC4", "#00795A", "#D55E00", "#A8507F"
INK, GREY, PALE = "#222222", "#6A6A6A", "#F3F3F3"
WIDTH, LEFT, GAP, MARGIN = 960, 56, 44, 14
HEIGHTS = (50, 50, 112, 54, 92, 104, 54, 54)
"""Of the floors, in pixels, from the lowest."""


@dataclass(frozen=True)
class Box:
    """Where a room is drawn: its floor from 0, its left edge and width in pixels, a colour, and a few words."""

    floor: int
    x: float
    width: float
    colour: str
    words: str = ""

    @property
    def top(self) -> float:
        return MARGIN + sum(height + GAP for height in HEIGHTS[self.floor + 1 :])

    @property
    def bottom(self) -> float:
        return self.top + HEIGHTS[self.floor]

    @property
    def right(self) -> float:
        return self.x + self.width


BOXES = {
    "cli": Box(7, 70, 876, INK, "one thin file a command"),
    "tuning": Box(6, 70, 560, PURPLE, "probe, replay, race; writes profiles"),
    "bench": Box(5, 70, 560, PURPLE, "runs arms on suites of prompts, grades the answers, writes the report"),
    "serve": Box(5, 654, 292, PURPLE, "OpenAI's interface over HTTP"),
    "training": Box(4, 70, 276, RED, "labels, trains and evaluates heads"),
    "theory": Box(4, 370, 276, RED, "theorems, replay, predictions"),
    "sprinter": Box(4, 670, 130, RED, "public names"),
    "engine": Box(
        3, 70, 770, ORANGE, "answers the loop with models: Pair, Task, RowDriver, steps, Scheduler"
    ),
    "plots": Box(3, 860, 86, GREY, "of matplotlib"),
    "decode": Box(2, 164, 270, BLUE, "the loop, rules and methods; no models"),
    "heads": Box(2, 446, 110, GREEN, "gate, stop heads"),
    "models": Box(2, 568, 322, SKY, "loads a pair; runs it over KV caches"),
    "random": Box(1, 204, 118, BLUE, "addressed draws"),
    "laws": Box(1, 336, 96, GREEN, "distributions"),
    "version": Box(0, 70, 92, GREY),
    "lazy": Box(0, 176, 108, GREY, "late imports"),
    "kinds": Box(0, 464, 122, GREY, "of trained heads"),
    "fingerprint": Box(0, 600, 120, GREY, "of a checkpoint"),
    "files": Box(0, 738, 104, GREY, "atomic writing"),
    "errors": Box(0, 860, 86, GREY, "UserError, ..."),
}
ROUTES = {
    ("bench", "sprinter"): (612, 700),
    ("serve", "engine"): (850, 825),
    ("decode", "lazy"): (182, 190),
    ("decode", "kinds"): (427, 560),
    ("decode", "random"): (263, 263),
    ("decode", "laws"): (390, 390),
    ("heads", "laws"): (462, 416),
    ("heads", "kinds"): (490, 572),
    ("heads", "fingerprint"): (515, 630),
    ("heads", "files"): (540, 760),
    ("models", "fingerprint"): (690, 690),
    ("models", "files"): (800, 800),
    ("models", "errors"): (870, 880),
    ("laws", "errors"): (400, 870),
    ("training", "plots"): (330, 880),
    ("theory", "plots"): (620, 900),
    ("plots", "errors"): (920, 920),
}
"""Where an arrow leaves and where it ends, in pixels from the left; others run straight down."""


def read_imports() -> dict[str, frozenset[str]]:
    """The imports between rooms, those inside functions and for type checkers too; ``__main__`` is left out."""
    graph = grimp.build_graph("sprinter", cache_dir=None)
    modules = [name for name in graph.modules if not name.endswith("__main__")]
    packages = {name for name in modules if graph.find_children(name)}

    def room(module: str) -> str:
        own = module if module in packages or module.count(".") == 1 else module.rpartition(".")[0]
        return own.partition(".")[2].replace(".", "/") or own

    found: dict[str, set[str]] = {room(name): set() for name in modules}
    for name in modules:
        imported = graph.find_modules_directly_imported_by(name)
        found[room(name)] |= {room(other) for other in imported} - {room(name)}
    return {name: frozenset(others) for name, others in sorted(found.items())}


def read_floors() -> list[set[str]]:
    """The floors that import-linter holds the modules to, from the lowest."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    return [set(re.findall(r"\w+", layer)) for layer in reversed(layers)]


def top_level(room: str) -> str:
    """The top-level package or module that a room belongs to."""
    return room.partition("/")[0]


def reduced(edges: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Edges of a graph without circles, those left out that lead where a longer way leads too."""
    below: dict[str, set[str]] = {}
    for one, other in edges:
        below.setdefault(one, set()).add(other)

    def reach(name: str) -> set[str]:
        return below.get(name, set()).union(*(reach(other) for other in below.get(name, ())))

    return sorted(
        (one, other)
        for one, others in below.items()
        for other in others
        if not any(other in reach(between) for between in others - {other})
    )


def arrows(imports: Imports) -> list[tuple[str, str]]:
    """Arrows of the picture: between top-level rooms, and between the sub-packages of one."""
    pairs = [(one, other) for one, others in imports.items() for other in others]
    tops = {(top_level(one), top_level(other)) for one, other in pairs}
    inside = {(one, other) for one, other in pairs if "/" in one and "/" in other}
    between = reduced((one, other) for one, other in tops if one != other)
    siblings = reduced((one, other) for one, other in inside if top_level(one) == top_level(other))
    return between + siblings


def list_imports(imports: Imports) -> str:
    """A line for each room, and what it imports."""
    width = max(map(len, imports))
    lines = [f"{name:{width}}  {' '.join(sorted(others))}".rstrip() for name, others in imports.items()]
    return "\n".join(lines)


# --- drawing ----------------------------------------------------------------------------------------------------------
def curve(one: str, other: str) -> tuple[float, float, float, float]:
    """(x, y) where an arrow between top-level rooms leaves, and (x, y) where it ends."""
    above, below = BOXES[one], BOXES[other]
    middle = (max(above.x, below.x) + min(above.right, below.right)) / 2
    start, end = ROUTES.get((one, other), (middle, middle))
    return start, above.bottom, end, below.top


def points(one: str, other: str, count: int = 60) -> Iterator[tuple[float, float]]:
    """Points of an arrow between top-level rooms: a Bézier curve that leaves and arrives upright."""
    x0, y0, x1, y1 = curve(one, other)
    half = (y0 + y1) / 2
    for i in range(1, count):
        t = i / count
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        yield (a + b) * x0 + (c + d) * x1, a * y0 + (b + c) * half + d * y1


def _text(x: float, y: float, words: str, colour: str = INK, size: float = 12, weight: str = "normal") -> str:
    style = f'fill="{colour}" font-size="{size:g}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{escape(words)}</text>'


def _rectangle(x: float, y: float, width: float, height: float, colour: str, stroke: float = 1.5) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="6" fill="white" stroke="{colour}" stroke-width="{stroke:g}"/>'


def _arrow(path: str, colour: str) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6" marker-end="url(#{colour[1:]})"/>'
    )


def sub_packages(room: str, imports: Imports) -> dict[str, tuple[float, float, float, float]]:
    """x, y, width, height of each sub-package in a room's box: who imports a sibling stands to its left."""
    edges = [edge for edge in arrows(imports) if "/" in edge[0]]
    names = [name for name in imports if name.startswith(f"{room}/")]
    depth = dict.fromkeys(names, 0)
    for _ in names:
        depth |= {one: max(depth[one], depth[other] + 1) for one, other in edges if one in depth}
    alone = {name: all(name not in edge for edge in edges) for name in names}
    names.sort(key=lambda name: (not alone[name], -depth[name], name))
    box, gap = BOXES[room], 18.0
    width = (box.width - 24 - gap * (len(names) - 1)) / max(1, len(names))
    return {
        name: (box.x + 12 + i * (width + gap), box.bottom - 46, width, 34.0) for i, name in enumerate(names)
    }


def draw(imports: Imports) -> str:
    """The picture as SVG."""
    height = 2 * MARGIN + sum(HEIGHTS) + GAP * (len(HEIGHTS) - 1)
    colours = sorted({box.colour for box in BOXES.values()})
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="DejaVu Sans, Verdana, Arial, sans-serif">',
        "<title>Packages of sprinter by floor, and what imports what</title>",
        "<!-- written by scripts/make_architecture.py -->",
        "<defs>",
        *(
            f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="7.5" refY="4" markerWidth="5" markerHeight="5" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
            for colour in colours
        ),
        "</defs>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for floor, tall in enumerate(HEIGHTS):
        top = Box(floor, 0, 0, INK).top
        lines += [
            f'<rect x="0" y="{top - 8:g}" width="{WIDTH}" height="{tall + 16:g}" fill="{PALE}"/>',
            _text(LEFT / 2, top + tall / 2 + 7, str(floor), GREY, 20, "bold"),
        ]
    pairs = arrows(imports)
    for one, other in pairs:
        if "/" not in one:
            x0, y0, x1, y1 = curve(one, other)
            half = (y0 + y1) / 2
            path = f"M{x0:g} {y0:g}C{x0:g} {half:g} {x1:g} {half:g} {x1:g} {y1:g}"
            lines.append(_arrow(path, BOXES[one].colour))
    for name, box in BOXES.items():
        centre, children = box.x + box.width / 2, sub_packages(name, imports)
        middle = (box.top + box.bottom - (46 if children else 0)) / 2
        lines.append(_rectangle(box.x, box.top, box.width, box.bottom - box.top, box.colour))
        lines.append(_text(centre, middle - 2 if box.words else middle + 5, name, box.colour, 15, "bold"))
        if box.words:
            lines.append(_text(centre, middle + 16, box.words))
        for child, (x, y, width, tall) in children.items():
            lines.append(_rectangle(x, y, width, tall, box.colour, 1))
            lines.append(_text(x + width / 2, y + 22, child.partition("/")[2], box.colour, 13))
        for one, other in pairs:
            if one in children:
                x0, x1 = sum(children[one][::2]), children[other][0]
                y = children[one][1] + 17
                lines.append(_arrow(f"M{x0:g} {y:g}L{x1:g} {y:g}", box.colour))
    return "\n".join([*lines, "</svg>", ""])


def write_list(page: str, imports: Imports) -> str:
    """The page with this list of imports."""
    block = f"<!-- imports:begin -->\n```text\n{list_imports(imports)}\n```\n<!-- imports:end -->"
    return re.sub(r"<!-- imports:begin -->.*<!-- imports:end -->", lambda _: block, page, flags=re.S)


def main() -> None:
    imports = read_imports()
    if left := {top_level(name) for name in imports} - BOXES.keys():
        raise SystemExit(f"no place in the picture: add {', '.join(sorted(left))} to BOXES")
    PICTURE.write_text(draw(imports), encoding="utf-8")
    PAGE.write_text(write_list(PAGE.read_text(encoding="utf-8"), imports), encoding="utf-8")
    print(f"{len(imports)} rooms, {sum(map(len, imports.values()))} imports between them")


if __name__ == "__main__":
    main()
