"""Bootstrap over prompts: ratios of sums, paired where two arms answered the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BootstrapInterval", "bootstrap", "bounds", "ratio_of_ratios", "ratio_of_sums"]

BootstrapInterval = tuple[float, float | None, float | None]
"""(value, low, high) of a 95 % interval; low and high are None for a single prompt, which shows no variance."""

Array = NDArray[np.float64]
LEVEL = 0.95
REPEATS = 2000


def bootstrap(
    statistic: Callable[[NDArray[np.int64]], Array], prompts: int, repeats: int = REPEATS, seed: int = 0
) -> BootstrapInterval:
    """Percentile interval of a statistic of prompts.

    Draws whose statistic is not finite (a division by zero, because the few prompts that count were not drawn) are left
    out.

    Args:
        statistic: indices ``[..., prompts]`` → values ``[...]``.
        prompts: number of prompts, which are the units that are drawn; repeats of a prompt stay together. With one
            prompt there is no interval.
    """
    value = float(statistic(np.arange(prompts)))
    if prompts < 2:
        return value, None, None
    picks = np.random.default_rng(seed).integers(prompts, size=(repeats, prompts))
    found = statistic(picks)
    values = np.sort(found[np.isfinite(found)])
    count, tail = len(values), (1 - LEVEL) / 2
    if not count:
        return value, None, None
    return value, float(values[int(tail * count)]), float(values[min(count - 1, int((1 - tail) * count))])


def bounds(of: BootstrapInterval) -> tuple[float, float]:
    """(low, high) for plotting: the value itself if there is no interval."""
    value, low, high = of
    return value if low is None else low, value if high is None else high


def ratio_of_sums(top: Sequence[float] | Array, bottom: Sequence[float] | Array) -> BootstrapInterval:
    """Σ top / Σ bottom over prompts, for example target calls per token. Both ``[prompts]``."""
    tops, bottoms = np.asarray(top, dtype=float), np.asarray(bottom, dtype=float)
    return bootstrap(lambda rows: _over(tops[rows].sum(-1), bottoms[rows].sum(-1)), len(tops))


def ratio_of_ratios(
    top: tuple[Sequence[float] | Array, Sequence[float] | Array],
    bottom: tuple[Sequence[float] | Array, Sequence[float] | Array],
) -> BootstrapInterval:
    """(Σa/Σb) / (Σc/Σd) for ``top`` = (a, b) and ``bottom`` = (c, d), each ``[prompts]``, paired by prompt.

    For speeds: a, c = tokens and b, d = seconds.
    """
    a, b, c, d = (np.asarray(values, dtype=float) for values in (*top, *bottom))

    def statistic(rows: NDArray[np.int64]) -> Array:
        sums = [values[rows].sum(-1) for values in (a, b, c, d)]
        return _over(sums[0] * sums[3], sums[1] * sums[2])

    return bootstrap(statistic, len(a))


def _over(top: Array, bottom: Array) -> Array:
    """Quotient; NaN for a division by zero."""
    return np.asarray(np.divide(top, bottom, out=np.full_like(bottom, np.nan), where=bottom != 0))
