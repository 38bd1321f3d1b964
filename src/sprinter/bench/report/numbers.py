"""Format numbers of a results file. A value that is missing, not finite or not a number is None, shown as –."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sprinter.bench.statistics import BootstrapInterval

__all__ = [
    "NONE", "count", "drift", "duration", "interval", "multiple", "number", "percentage", "text_of", "value",
]  # fmt: skip

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


def _number(middle: float) -> str:
    if middle == 0:
        return "0"
    places = max(0, min(4, 2 - math.floor(math.log10(abs(middle)))))
    return f"{middle:,.{places}f}".replace("-", "−")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _shown(form: Callable[[float], str]) -> Callable[[Any], str]:
    return lambda of: NONE if (middle := value(of)) is None else form(middle)


number = _shown(_number)
"""A number with about three significant digits: 1,234 · 56.1 · 1.62 · 0.0312."""
count = _shown("{:,.0f}".format)
"""A whole number: 1,234."""
multiple = _shown("{:.2f}×".format)
"""A speed-up: 1.62×."""
drift = _shown(lambda middle: f"{middle:.4f}" if middle else "0")
"""A drift with four decimals, so that columns can be compared."""
percentage = _shown(lambda share: f"{100 * share:.{1 if share < 0.9995 else 0}f} %")
"""A share in per cent."""
duration = _shown(_duration)
"""A duration: 90 → 1 min 30 s."""


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
