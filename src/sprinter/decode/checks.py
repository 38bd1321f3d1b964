"""Range checks of parameters, with one-line errors that name the valid range."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError, refuse_long

__all__ = ["at_least", "between", "boolean", "one_of", "positive", "ranged", "whole"]


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise a UserError unless ``low <= value <= high``."""
    refuse_long(name, value)
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise UserError(f"{name}={value} is out of range: give a number in [{low:g}, {high:g}]")


def ranged(config: object, name: str, low: float, high: float) -> None:
    """``between`` for a field of a frozen dataclass; stores an int or float, as torch rejects other number types."""
    value = getattr(config, name)
    between(name, value, low, high)
    if type(value) not in (int, float):
        object.__setattr__(config, name, float(value))


def at_least(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise a UserError unless the value is a whole number >= low, and <= high if that is given."""
    refuse_long(name, value)
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or number < low or (high is not None and number > high):
        span = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise UserError(f"{name}={value} is out of range: give a whole number {span}")


def positive(config: Any, *names: str) -> None:
    """Raise a UserError unless these fields of a dataclass are whole numbers >= 1, or None if that is the default."""
    for name in names:
        if (value := getattr(config, name)) is not None or config.__dataclass_fields__[
            name
        ].default is not None:
            at_least(name, value, 1)


def one_of(kind: str, value: object, known: Iterable[str]) -> None:
    """Raise a UserError unless the value is one of the known names; it suggests the nearest one."""
    if value not in (names := list(known)):
        raise did_you_mean(kind, str(value), names)


def boolean(config: object, *names: str) -> None:
    """Raise a UserError unless these fields are true or false."""
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise UserError(f"{name}={value} is out of range: give true or false")


def whole(name: str, value: object) -> int:
    """The value as an int, from any integer type (numpy's too); raises a UserError for others, and those too long."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name}={value} is not a whole number: give an integer")
    refuse_long(name, value)
    return int(value)
