"""Format numbers of a results file. A value that is missing, not finite or not a number is None, shown as –."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sprinter.bench.statistics import BootstrapInterval

__all__ = [
    "NONE",
    "count",
    "drift",
    "duration",
    "interval",
    "multiple",
    "number",
    "percentage",
    "text_of",
    "value",
]

NONE = "–"


def value(of: Any) -> float | None:
    """A finite number; for an interval, its value."""
    if isinstance(of, list | tuple):
        of = of[0] if of else None
    if isinstance(of, bool) or not isinstance(of, int | float) or not math.isfinite(of):
        return None
    return float(of)


def interval(of: Any) -> BootstrapInterval | None:
    """(value, low, high); a plain number, or an end that is not finite, has no interval."""
    middle = value(of)
    if middle is None:
        return None
    ends = [value(end) for end in of[1:3]] if isinstance(of, list | tuple) else []
    low, high = (*ends, None, None)[:2]
    return middle, low, high


def number(of: Any, digits: int = 3) -> str:
    """A number with about ``digits`` significant digits: 1,234 · 56.1 · 1.62 · 0.0312."""
    middle = value(of)
    if middle is None:
        return NONE
    if middle == 0:
        return "0"
    places = max(0, min(4, digits - 1 - math.floor(math.log10(abs(middle)))))
    return f"{middle:,.{places}f}".replace("-", "−")


def count(of: Any) -> str:
    """A whole number: 1,234."""
    middle = value(of)
    return NONE if middle is None else f"{middle:,.0f}"


def multiple(of: Any) -> str:
    """A speed-up: 1.62×."""
    middle = value(of)
    return NONE if middle is None else f"{middle:.2f}×"


def drift(of: Any) -> str:
    """A drift with four decimals, so that columns can be compared."""
    middle = value(of)
    return NONE if middle is None else f"{middle:.4f}" if middle else "0"


def percentage(of: Any) -> str:
    """A share in per cent."""
    middle = value(of)
    return NONE if middle is None else f"{100 * middle:.{1 if middle < 0.9995 else 0}f} %"


def duration(seconds: Any) -> str:
    """A duration: 90 → 1 min 30 s."""
    whole = value(seconds)
    if whole is None:
        return NONE
    if whole < 60:
        return f"{whole:.1f} s"
    minutes, rest = divmod(round(whole), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def text_of(of: Any) -> str:
    """Any JSON value on one line."""
    if of is None or of == "" or of == [] or of == {}:
        return NONE
    if isinstance(of, bool):
        return "yes" if of else "no"
    if isinstance(of, Mapping):
        return " · ".join(f"{key} {text_of(inner)}" for key, inner in of.items())
    if isinstance(of, list | tuple):
        return ", ".join(text_of(inner) for inner in of)
    if isinstance(of, int):
        return f"{of:,}"
    return f"{of:g}" if isinstance(of, float) else str(of)
