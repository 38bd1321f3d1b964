from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.bench.rows import results_of, rows_of

from sprinter.bench.compare import compare
from sprinter.errors import UserError

RNG = np.random.default_rng(5)


def run(factor: float = 1.0, drift: float = 0.1, machine: float = 1.0) -> dict[str, Any]:
    """Two arms on 60 prompts of different length, 3 % noise; ``factor`` slows the second one."""
    work = np.random.default_rng(0).gamma(4.0, 0.05, 60) * machine

    def times(scale: float) -> np.ndarray:
        return work * scale * RNG.normal(1.0, 0.03, 60)

    drifts = np.clip(RNG.normal(drift, 0.02, 60), 0, 1)
    fast = [
        one | {"drift_sum": 20 * d}
        for one, d in zip(rows_of("fast", times(0.5 * factor)), drifts, strict=True)
    ]
    return results_of(rows_of("plain", times(1.0)) + fast)


def verdicts(before: dict[str, Any], after: dict[str, Any], **options: Any) -> dict[str, str]:
    return {c.measure: c.verdict for c in compare(before, after, **options) if c.arm == "fast"}


def test_a_slowdown_of_five_percent_is_flagged_and_a_gain_too() -> None:
    assert verdicts(run(), run(1.05))["speed over plain"] == "worse"
    assert verdicts(run(1.05), run())["speed over plain"] == "better"


def test_equal_runs_are_the_same_on_another_machine_too() -> None:
    """A 95 % interval misses in 1 of 20 equal runs: at most 5 of 40 here (chance of more: 1.4 %; the seed is fixed)."""
    missed = sum(verdicts(run(), run(machine=3.0))["speed over plain"] != "same" for _ in range(40))
    assert missed <= 5
    assert verdicts(run(), run(machine=3.0))["tokens/s"] == "told"


def test_without_a_base_tokens_per_second_are_judged() -> None:
    before, after = run(), run(machine=1.1)
    for results in (before, after):
        results["settings"]["bases"] = []
    assert verdicts(before, after)["tokens/s"] == "worse"


def test_a_tolerance_lets_a_small_loss_pass() -> None:
    assert verdicts(run(), run(1.05), tolerance=0.1)["speed over plain"] == "same"


def test_more_drift_is_flagged() -> None:
    found = verdicts(run(), run(drift=0.15))
    assert found["mean drift"] == "worse"
    assert found["target calls/token"] == "same"


def test_runs_that_share_nothing_are_refused() -> None:
    other = results_of(rows_of("else", np.full(3, 0.1)))
    with pytest.raises(UserError, match="no arm"):
        compare(run(), other)
    with pytest.raises(UserError, match="did not take part"):
        compare(run(), run(), base="absent")
    with pytest.raises(UserError, match="no results"):
        compare({"schema": "x"}, run())
