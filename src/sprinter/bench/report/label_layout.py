"""Place labels next to their marks; a label without room is left out (the mark's tooltip has its text)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["PlacedLabel", "Taken", "lane_rows", "place"]

_LETTER, _HEIGHT = 6.3, 13.0
"""Width and height of a letter in pixels at the style's font size, slightly above the mean."""
Spot = tuple[float, float, str]
_SPOTS: Sequence[Spot] = (
    (9, 4, "start"), (-9, 4, "end"), (0, -9, "middle"), (0, 17, "middle"), (7, -7, "start"), (-7, -7, "end"),
    (7, 14, "start"), (-7, 14, "end"), (14, -15, "start"), (-14, -15, "end"), (14, 22, "start"), (-14, 22, "end"),
)  # fmt: skip
"""Offsets that are tried in order: right, down, and text anchor."""


class Taken(NamedTuple):
    """Area that labels must not cover: share of the width, pixels down, half its size."""

    x: float
    y: float
    size: float


class PlacedLabel(NamedTuple):
    """A text that belongs to a point: share of the width, pixels down, urgency (high first), the arm's index."""

    x: float
    y: float
    text: str
    urgency: int
    arm: int


_Box = tuple[float, float, float, float]


def place(
    labels: Sequence[PlacedLabel], marks: Sequence[Taken], width: int, height: int
) -> list[tuple[PlacedLabel, Spot]]:
    """(label, offset) of the labels that overlap no mark, no other label and no edge at this width."""
    taken: list[_Box] = [(x * width - r, y - r, x * width + r, y + r) for x, y, r in marks]
    placed: list[tuple[PlacedLabel, Spot]] = []
    for label in sorted(labels, key=lambda each: -each.urgency):
        for spot in _SPOTS:
            box = _box(label, spot, width)
            inside = box[0] >= -2 and box[2] <= width + 10 and box[1] >= -6 and box[3] <= height + 1
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                placed.append((label, spot))
                break
    return placed


def lane_rows(places: Sequence[float], width: int = 280, size: float = 14.0) -> list[int]:
    """Assign a row to each place (share of the width) so that marks in one row do not overlap."""
    rows: list[float] = []
    found = [0] * len(places)
    for i in sorted(range(len(places)), key=lambda i: places[i]):
        x = places[i] * width
        row = next((row for row, last in enumerate(rows) if x - last >= size), len(rows))
        rows[row:] = [x] if row == len(rows) else [x, *rows[row + 1 :]]
        found[i] = row
    return found


def _box(label: PlacedLabel, spot: Spot, width: int) -> _Box:
    dx, dy, side = spot
    length = _LETTER * len(label.text)
    x = label.x * width + dx - {"start": 0.0, "middle": length / 2, "end": length}[side]
    return x, label.y + dy - _HEIGHT + 3, x + length, label.y + dy + 3


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
