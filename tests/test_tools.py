"""The statistics that other tests lean on, against values from tables."""

from __future__ import annotations

import math

import pytest
from tests.tools import chi_square_p, rate_p, uniform_p


def test_chi_square() -> None:
    assert chi_square_p([10, 20, 30], [1 / 3] * 3) == pytest.approx(math.exp(-5))  # statistic 10, 2 degrees
    assert chi_square_p([50, 50], [0.5, 0.5]) == 1.0
    assert chi_square_p([99, 1], [1.0, 0.0]) == 0.0  # drawn, though impossible
    # Ten cells that expect one each are pooled into two that expect five.
    pooled = chi_square_p([0] * 10 + [1000], [0.001] * 10 + [0.99])
    assert pooled == pytest.approx(math.exp(-(5 + 5 + 10**2 / 990) / 2))


def test_kolmogorov_smirnov() -> None:
    grid = [(i + 0.5) / 1000 for i in range(1000)]
    assert uniform_p(grid) == pytest.approx(1.0)
    assert uniform_p([u**1.3 for u in grid]) < 1e-4
    gap = 1.3581 / (math.sqrt(1000) + 0.12 + 0.11 / math.sqrt(1000)) - 0.0005
    assert uniform_p([min(1.0, u + gap) for u in grid]) == pytest.approx(0.05, abs=2e-3)  # its 5 % point


def test_rates() -> None:
    assert rate_p(500, 1000, 0.5) == 1.0
    assert rate_p(550, 1000, 0.5) == pytest.approx(0.00157, rel=0.01)  # 3.16 deviations
