"""Pictures of the gallery as SVG, without a library: texts in the colours of their origins, and charts."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path

COLOURS = {
    "trusted": "#f7d98c",
    "accepted": "#bfe2f6",
    "replacement": "#f0b090",
    "bonus": "#9fdcc5",
    "target": "#e4e4e4",
}
INKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#555555")
WIDTH, LINE, CHAR, COLUMNS = 560, 24, 8.4, 63


def save(name: str, height: float, parts: Iterable[str]) -> Path:
    """Write a picture into the folder that the command line names, else into docs/gallery."""
    folder = (
        Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs" / "gallery"
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.svg"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
    ground = f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>'
    file.write_text("\n".join([head, ground, *parts, "</svg>", ""]), encoding="utf-8")
    return file


def label(x: float, y: float, text: str, size: int = 13, anchor: str = "start", fill: str = "#222") -> str:
    """A line of text."""
    where = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {where} fill="{fill}">{escape(text)}</text>'


def texts(name: str, shown: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """Texts below their titles, each token (text, origin) in the colour of its origin; a prompt's origin is ""."""
    parts, y = [], 14.0
    origins = [
        origin for origin in COLOURS if any(origin == own for text in shown.values() for _, own in text)
    ]
    for number, origin in enumerate(origins):
        parts.append(
            f'<rect x="{12 + 108 * number}" y="{y - 4}" width="14" height="14" fill="{COLOURS[origin]}"/>'
        )
        parts.append(label(32 + 108 * number, y + 8, origin))
    y += 36
    for title, tokens in shown.items():
        parts.append(label(12, y, title, 14))
        y, column = y + LINE, 0
        for place, (text, origin) in enumerate(tokens):
            word = text + "".join(
                takewhile(lambda one: not one[:1].isspace(), (one for one, _ in tokens[place + 1 :]))
            )
            needed = len(word) if text[:1] == " " else len(text.strip("\n"))
            if column and column + needed > COLUMNS:
                y, column = y + LINE, 0
            for number, part in enumerate(text.split("\n")):
                if number:
                    y, column = y + LINE, 0
                if part:
                    parts.append(_token(part, origin, 12 + CHAR * column, y))
                    column += len(part)
        y += 1.5 * LINE
    return save(name, y, parts)


def _token(text: str, origin: str, x: float, y: float) -> str:
    width = CHAR * len(text)
    fill = COLOURS.get(origin, "#fff")
    box = f'<rect x="{x:.1f}" y="{y - 14:.0f}" width="{width - 1:.1f}" height="19" fill="{fill}"/>'
    return (
        f'{box}<text x="{x:.1f}" y="{y:.0f}" font-size="14" font-family="monospace" xml:space="preserve" '
        f'textLength="{width:.1f}" fill="#111">{escape(text)}</text>'
    )


def chart(
    name: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    lines: Container[str] | None = None,
) -> Path:
    """Series of points (x, y) on axes that begin at 0; ``lines`` names those whose points are joined, None all."""
    parts, place, top = [], 70.0, 26.0
    for number, title in enumerate(series):
        wide = 40 + 7.2 * len(title)
        if number and place + wide > WIDTH:
            place, top = 70.0, top + 22
        parts += [f'<circle cx="{place:.1f}" cy="{top - 14:.0f}" r="5" fill="{INKS[number % len(INKS)]}"/>',
                  label(place + 12, top - 10, title)]  # fmt: skip
        place += wide
    left, width, height = 70.0, WIDTH - 90.0, 300.0
    points = [point for one in series.values() for point in one]
    most_x, most_y = (_ceiling(max(point[axis] for point in points)) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + width * point[0] / most_x, top + height * (1 - point[1] / most_y)

    parts.append(f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#444"/>')
    for tick in _ticks(most_x):
        parts.append(label(at((tick, 0))[0], top + height + 18, f"{tick:g}", 12, "middle"))
    for tick in _ticks(most_y):
        _, py = at((0, tick))
        parts += [label(left - 8, py + 4, f"{tick:g}", 12, "end"),
                  f'<path d="M{left} {py:.1f}H{left + width}" stroke="#eee"/>']  # fmt: skip
    parts.append(label(left + width / 2, top + height + 40, x, 13, "middle"))
    parts.append(
        f'<g transform="rotate(-90 18 {top + height / 2})">{label(18, top + height / 2, y, 13, "middle")}</g>'
    )
    for number, (title, one) in enumerate(series.items()):
        ink, places = INKS[number % len(INKS)], [at(point) for point in one]
        if lines is None or title in lines:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{ink}"/>' for px, py in places]
    return save(name, top + height + 56, parts)


STEPS = {1: 5, 1.5: 3, 2: 4, 2.5: 5, 3: 3, 4: 4, 5: 5, 6: 3, 8: 4, 10: 5, 15: 3}
"""The end of an axis, but for a power of ten, and into how many parts it is divided."""


def _ceiling(most: float) -> float:
    """The end of an axis: a round number above the largest value."""
    unit = 10.0 ** (len(f"{most:.0f}") - 1) if most >= 1 else 0.1
    while unit > most:
        unit /= 10
    return next(step * unit for step in STEPS if step * unit >= most)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the end of an axis."""
    digits = most
    while digits < 1 - 1e-9:
        digits *= 10
    while digits > 15 + 1e-9:
        digits /= 10
    parts = min(STEPS.items(), key=lambda one: abs(one[0] - digits))[1]
    return [most * number / parts for number in range(parts + 1)]
