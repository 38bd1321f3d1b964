"""Bootstrap over prompts: ratios of sums, paired where two arms answered the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BootstrapInterval", "PromptSums", "bootstrap", "bounds", "product_of_ratios", "ratio_of_ratios", "ratio_of_sums",
]  # fmt: skip

BootstrapInterval = tuple[float, float | None, float | None]
"""(value, low, high) of a 95 % interval; low and high are None for a single prompt, which shows no variance."""

Array = NDArray[np.float64]
LEVEL = 0.95
REPEATS = 2000


def bootstrap(statistic: Callable[[NDArray[np.int64]], Array], prompts: int) -> BootstrapInterval:
    """Percentile interval of a statistic of prompts.

    Draws whose statistic is not finite (a division by zero, because the few prompts that count were not drawn) are left
    out.

    Args:
        statistic: indices ``[..., prompts]`` → values ``[...]``.
        prompts: number of prompts, which are the units that are drawn; repeats of a prompt stay together. With one
            prompt there is no interval.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(np.arange(prompts)))
        if prompts < 2:
            return value, None, None
        found = statistic(np.random.default_rng(0).integers(prompts, size=(REPEATS, prompts)))
    values = np.sort(found[np.isfinite(found)])
    count, tail = len(values), (1 - LEVEL) / 2
    if not count:
        return value, None, None
    return value, float(values[int(tail * count)]), float(values[min(count - 1, int((1 - tail) * count))])


def bounds(of: BootstrapInterval) -> tuple[float, float]:
    """(low, high) for plotting: the value itself if there is no interval."""
    value, low, high = of
    return value if low is None else low, value if high is None else high


PromptSums = Sequence[float] | Array
"""A number for each prompt, ``[prompts]``, summed over the prompts that are drawn."""


def ratio_of_sums(top: PromptSums, bottom: PromptSums) -> BootstrapInterval:
    """Σ top / Σ bottom over prompts, for example target calls per token."""
    return product_of_ratios((top, bottom))


def ratio_of_ratios(
    top: tuple[PromptSums, PromptSums], bottom: tuple[PromptSums, PromptSums]
) -> BootstrapInterval:
    """(Σa/Σb) / (Σc/Σd) for ``top`` = (a, b) and ``bottom`` = (c, d), paired by prompt.

    For speeds: a, c = tokens and b, d = seconds.
    """
    return product_of_ratios(top, bottom[::-1])


def product_of_ratios(*ratios: tuple[PromptSums, PromptSums]) -> BootstrapInterval:
    """Π (Σa/Σb) over the pairs (a, b), paired by prompt."""
    tops, bottoms = ([np.asarray(each, dtype=float) for each in side] for side in zip(*ratios, strict=True))

    def statistic(rows: NDArray[np.int64]) -> Array:
        top, bottom = (np.prod([each[rows].sum(-1) for each in side], axis=0) for side in (tops, bottoms))
        return np.asarray(np.divide(top, bottom, out=np.full_like(bottom, np.nan), where=bottom != 0))

    return bootstrap(statistic, len(tops[0]))
