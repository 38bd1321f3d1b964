"""Whoever survives NaN, interrupts and cancels around it wrote what it writes alone: float64, to the token."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.engine.conftest import double_pair
from tests.engine.disturbed import KINDS, SEVERAL, SINGLE, Disturber, Trial


def disturb(requests: int, seed: int, longest: int, often: float = 1.0) -> Counter[str]:
    chance, counts = random.Random(seed), Counter[str]()
    pairs, disturber = {kind: (double_pair(), double_pair()) for kind in KINDS}, Disturber(chance, often)
    trial = 0
    while counts["requests"] < requests:
        # Most in engines over rows; every fifth trial streams, every sixth the one row of a crop runner.
        kind = "crop" if trial % 6 == 5 else KINDS[trial % 2]
        Trial(*pairs[kind], kind, chance, disturber, counts, longest).run(10, 10 * trial, trial % 5 == 4)
        trial += 1
    return counts + disturber.seen


def test_a_hundred_disturbed_requests() -> None:
    counts = disturb(100, 1, 10, often=3.0)
    assert counts["survived"] >= 40 and counts["failed"] >= 5 and counts["interrupted"] >= 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_disturbed_requests() -> None:
    counts = disturb(1000, 2, 24)
    for name, count in sorted(counts.items()):
        print(f"{count:6} {name}")
    assert (
        counts["survived"] >= 300
        and counts["interrupted"] >= 50
        and counts["failed"] >= 50
        and counts["cancelled"] >= 10
    )
    for kind in KINDS:
        for method in SINGLE if kind == "crop" else SINGLE + SEVERAL:
            assert counts[f"{kind} × {method.partition('(')[0]}"] > 0
