"""Statistics for tests that draw samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# A test that draws fails by chance with this probability (over the choice of its fixed seed), unless it says otherwise.
FALSE_ALARM = 1e-4


def chi_square_p(counts: Sequence[float], chances: Sequence[float]) -> float:
    """p-value of Pearson's test that ``counts`` come from ``chances``. Cells that expect fewer than 5 are pooled."""
    assert len(counts) == len(chances)
    total = sum(counts)
    assert math.isclose(sum(chances), 1.0, abs_tol=1e-6), "not a law"
    if any(count > 0 and chance <= 0 for count, chance in zip(counts, chances, strict=True)):
        return 0.0
    cells = sorted((total * chance, count) for count, chance in zip(counts, chances, strict=True))
    pooled: list[list[float]] = [[0.0, 0.0]]
    for expected, count in cells:
        if pooled[-1][0] >= 5:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += expected
        pooled[-1][1] += count
    assert len(pooled) > 1, "too few draws for a test"
    statistic = sum((count - expected) ** 2 / expected for expected, count in pooled)
    half_df, half = torch.tensor([(len(pooled) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half_df, half))


def uniform_p(values: Sequence[float]) -> float:
    """p-value of the Kolmogorov-Smirnov test that ``values`` are uniform on [0, 1] (asymptotic series)."""
    n, ranked = len(values), sorted(values)
    gap = max(max((i + 1) / n - u, u - i / n) for i, u in enumerate(ranked))
    scaled = gap * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    if scaled < 0.3:  # there the series converges too slowly, and the p-value is 1 to five places
        return 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * series))


def rate_p(hits: int, n: int, chance: float) -> float:
    """p-value (normal approximation, two-sided) that ``hits`` of ``n`` happen with ``chance``."""
    z = (hits - n * chance) / math.sqrt(n * chance * (1 - chance))
    return math.erfc(abs(z) / math.sqrt(2))
