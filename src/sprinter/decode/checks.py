"""Range checks of parameters, with one-line errors that name the valid range."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field, fields, is_dataclass, replace
from numbers import Integral, Real
from typing import Any, Self

from sprinter.decode.costs import MEASURED, PassCosts
from sprinter.errors import UserError, did_you_mean, refuse_long

__all__ = [
    "Parameters", "at_least", "between", "choice", "count", "flag", "number", "one_of", "positive", "ranged", "whole",
]  # fmt: skip


def between(name: str, value: object, low: float, high: float) -> None:
    """Raise a UserError unless ``low <= value <= high``."""
    refuse_long(name, value)
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= float(value) <= high:
        raise UserError(f"{name}={value} is out of range: give a number in [{low:g}, {high:g}]")


def ranged(config: object, name: str, low: float, high: float) -> None:
    """``between`` for a field of a frozen dataclass; stores an int or float, as torch rejects other number types."""
    value = getattr(config, name)
    between(name.rstrip("_"), value, low, high)
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


def whole(name: str, value: object) -> int:
    """The value as an int, from any integer type (numpy's too); raises a UserError for others, and those too long."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name}={value} is not a whole number: give an integer")
    refuse_long(name, value)
    return int(value)


# --- fields that say what they take ----------------------------------------------------------------------------------
class Parameters:
    """Base of frozen dataclasses whose fields may be ``number``, ``count``, ``choice`` or ``flag``: they are checked.

    A subclass with a ``__post_init__`` of its own calls ``Parameters.__post_init__(self)`` in it.
    """

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]
            if "check" in one.metadata:
                one.metadata["check"](self, one.name)

    def _values(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)} if is_dataclass(self) else {}

    @property
    def measures(self) -> bool:
        """Whether a parameter, or one of a rule in it, is "measured": ``priced`` needs the costs of forward passes."""
        return any(
            one.measures if isinstance(one, Parameters) else isinstance(one, str) and one == MEASURED
            for one in self._values().values()
        )

    def priced(self, costs: PassCosts) -> Self:
        """With the costs of these passes, by the names of the parameters, in place of "measured"."""
        known: dict[str, Any] = {}
        for name, value in self._values().items():
            if isinstance(value, Parameters):
                known[name] = value.priced(costs)
            elif isinstance(value, str) and value == MEASURED:
                cost = getattr(costs, name)
                known[name] = cost if isinstance(cost, str) else float(f"{cost:.2g}")
        return replace(self, **known) if self.measures else self  # type: ignore[type-var]


def _checked(default: object, check: Callable[[Any, str], None]) -> Any:
    return field(default=default, metadata={"check": check})


def number(default: float | str, low: float, high: float, word: str | None = None) -> Any:
    """A number in [low, high]; ``word``, or a default that is a word, may be in its place."""
    allowed = default if isinstance(default, str) else word

    def check(config: Any, name: str) -> None:
        if allowed is None or getattr(config, name) != allowed:
            ranged(config, name, low, high)

    return _checked(default, check)


def count(default: int, low: int = 1, high: int | None = None) -> Any:
    """A whole number >= low, and <= high if that is given."""
    return _checked(default, lambda config, name: at_least(name, getattr(config, name), low, high))


def choice(default: str, kind: str, known: Iterable[str]) -> Any:
    """One of the known names; ``kind``: what they are, for the message."""
    return _checked(default, lambda config, name: one_of(kind, getattr(config, name), known))


def flag(default: bool) -> Any:
    """True or false."""

    def check(config: Any, name: str) -> None:
        if not isinstance(value := getattr(config, name), bool):
            raise UserError(f"{name}={value} is out of range: give true or false")

    return _checked(default, check)
