"""Range checks of rule parameters: one helpful line each."""

from __future__ import annotations

from numbers import Integral, Real

from sprinter.errors import UserError

__all__ = ["at_least", "between", "ranged", "whole"]


def between(name: str, value: object, low: float, high: float) -> None:
    """``low <= value <= high``, else a UserError that names the range."""
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise UserError(f"{name}={value} is out of range: give a number in [{low:g}, {high:g}]")


def ranged(config: object, name: str, low: float, high: float) -> None:
    """``between`` for a parameter of a frozen dataclass, which then holds a plain number: torch takes no fraction."""
    value = getattr(config, name)
    between(name, value, low, high)
    if type(value) not in (int, float):
        object.__setattr__(config, name, float(value))


def at_least(name: str, value: object, low: int) -> None:
    """A whole number >= low, else a UserError."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < low:
        raise UserError(f"{name}={value} is out of range: give a whole number >= {low}")


def whole(name: str, value: object) -> int:
    """Any kind of whole number (numpy's too) as an int, else a UserError."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name}={value} is not a whole number: give an integer")
    return int(value)
