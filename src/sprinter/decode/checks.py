"""Range checks of rule parameters: one helpful line each."""

from __future__ import annotations

import math

from sprinter.errors import UserError

__all__ = ["at_least", "between"]


def between(name: str, value: float, low: float, high: float) -> None:
    """``low <= value <= high``, else a UserError that names the range."""
    if not _is_number(value) or not low <= value <= high:
        raise UserError(f"{name}={value} is out of range: give a number in [{low:g}, {high:g}]")


def at_least(name: str, value: int, low: int) -> None:
    """A whole number >= low, else a UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{name}={value} is out of range: give a whole number >= {low}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
