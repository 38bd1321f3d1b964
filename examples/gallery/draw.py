"""Pictures of the gallery as SVG, without a library: texts in the colours of their origins, and charts."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

COLOURS = {
    "trusted": "#f7d98c",
    "accepted": "#bfe2f6",
    "replacement": "#f0b090",
    "bonus": "#9fdcc5",
    "target": "#e4e4e4",
}
INKS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#555555")
WIDTH, LINE, CHAR, COLUMNS = 760, 24, 8.4, 84


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
            f'<rect x="{12 + 130 * number}" y="{y - 4}" width="14" height="14" fill="{COLOURS[origin]}"/>'
        )
        parts.append(label(32 + 130 * number, y + 8, origin))
    y += 36
    for title, tokens in shown.items():
        parts.append(label(12, y, title, 14))
        y, column = y + LINE, 0
        for text, origin in tokens:
            if column + len(text) > COLUMNS:
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
    name: str, series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str, line: bool = True
) -> Path:
    """Series of points (x, y), joined by lines or not, on axes that begin at 0."""
    left, top, width, height = 70.0, 16.0, 440.0, 300.0
    points = [point for one in series.values() for point in one]
    most_x, most_y = (_ceiling(max(point[axis] for point in points)) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return left + width * point[0] / most_x, top + height * (1 - point[1] / most_y)

    parts = [f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="#444"/>']
    for step in range(6):
        (px, _), (_, py) = at((most_x * step / 5, 0)), at((0, most_y * step / 5))
        parts += [label(px, top + height + 18, f"{most_x * step / 5:g}", 12, "middle"),
                  label(left - 8, py + 4, f"{most_y * step / 5:g}", 12, "end"),
                  f'<path d="M{left} {py:.1f}H{left + width}" stroke="#eee"/>']  # fmt: skip
    parts.append(label(left + width / 2, top + height + 40, x, 13, "middle"))
    parts.append(
        f'<g transform="rotate(-90 18 {top + height / 2})">{label(18, top + height / 2, y, 13, "middle")}</g>'
    )
    for number, (title, one) in enumerate(series.items()):
        ink, places = INKS[number % len(INKS)], [at(point) for point in one]
        if line:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{ink}"/>' for px, py in places]
        parts += [f'<circle cx="{left + width + 24}" cy="{top + 12 + 22 * number}" r="5" fill="{ink}"/>',
                  label(left + width + 36, top + 16 + 22 * number, title)]  # fmt: skip
    return save(name, top + height + 56, parts)


def _ceiling(most: float) -> float:
    """The end of an axis: a round number above the largest value."""
    unit = 10.0 ** (len(f"{most:.0f}") - 1) if most >= 1 else 0.1
    while unit > most:
        unit /= 10
    return next(step * unit for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15) if step * unit >= most)
