"""benchmarks/llamacpp/tables.py: what is said of measured numbers."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

COSTS = {"target": {"1": 1.0, "2": 1.4, "4": 2.0}, "draft": {"1": 0.1, "2": 0.12, "4": 0.2}}
COSTS |= {
    f"{which}, another size": {n: ms + 0.3 for n, ms in costs.items()} for which, costs in COSTS.items()
}
ONE = [1.0, 0.9, 1.1]


@pytest.fixture
def tables() -> Any:
    """The script as a module."""
    return importlib.import_module("benchmarks.llamacpp.tables")


def row(arm: str, calls: float, read: float, steps: float, host_ms: float, speed: float) -> dict[str, Any]:
    """An arm whose passes cost what ``COSTS`` says, and ``host_ms`` besides."""
    passes = calls * {0: 0.0, 1: 1.0, 3: 1.7}[round(read)] + steps * 0.1
    ms = {"prefill_s": 0.5, "draft_s": 0.0, "gate_s": 0.0, "target_s": passes, "other_s": host_ms}
    each = {"target_calls": calls, "target_tokens": calls * read, "draft_steps": steps, "draft_tokens": steps}
    return {
        "arm": arm, "tokens_per_s": 100.0, "over_plain": [speed, speed - 0.1, speed + 0.1], "over_own_loop": ONE,
        "drift": [0.1, 0.09, 0.11], "sizes_change": False, "per_token": each, "ms_per_token": ms,
    }  # fmt: skip


def test_the_prediction_counts_passes_alone(tables: Any) -> None:
    plain = row("autoregressive", 1, 1, 0, 0.1, 1.0)
    found = tables.predict(row("speculative(gamma=2)", 0.5, 3, 0.9, 0.4, 1.2), plain, COSTS)
    assert found["tokens_per_call"] == 2 and found["read_per_call"] == 3
    assert found["pass_over_one"] == pytest.approx(1.7) and found["draft_over_target"] == pytest.approx(0.1)
    assert found["models_ms"] == pytest.approx(0.5 + 0.5 * 1.7 + 0.9 * 0.1)
    assert found["host_ms"] == pytest.approx(0.4)
    assert found["predicted"] == pytest.approx(1.5 / found["models_ms"])
    other = tables.predict(row("sprinter", 0.5, 3, 0.9, 0.4, 1.2) | {"sizes_change": True}, plain, COSTS)
    assert other["models_ms"] - found["models_ms"] == pytest.approx(0.5 * 0.3)
    alone = tables.predict(row("draft-only", 0, 0, 1, 0.1, 3.0), plain, COSTS)
    assert math.isinf(alone["tokens_per_call"]) and alone["models_ms"] == pytest.approx(0.6)
    assert tables.predict(plain, plain, COSTS)["predicted"] == 1


def measured(tables: Any) -> dict[str, Any]:
    """What the script would keep of one target."""
    plain = row("autoregressive", 1, 1, 0, 0.1, 1.0)
    rows = [
        plain,
        row("speculative(gamma=2)", 0.5, 3, 0.9, 0.4, 0.9),
        row("sprinter(tau=0.6)", 0.2, 3, 1.0, 0.2, 1.6),
    ]
    rows.append(row("lookup", 0.99, 3, 0, 0.1, 0.7))
    for one in rows:
        one |= tables.predict(one, plain, COSTS)
    own = {"arm": "llamacpp:plain", "tokens_per_s": 99.0, "over_plain": ONE, "over_own_loop": ONE}
    best = {
        name: {"arm": rows[2]["arm"], "over_plain": ONE, "drift": [0.1, 0.1, 0.1]}
        for name in ("sprinter", "any")
    }
    part = {"gamma": 2, "rows": [own, *rows], "best": best, "passes_ms": COSTS, "parameters": 3_000_000}
    return {"the built-in target, f16": part}


def test_each_method_that_loses_is_told_why(tables: Any) -> None:
    text = tables.table(measured(tables))
    told = [line for line in text.splitlines() if line.startswith("- `")]
    assert len(told) == 2
    assert told[0].startswith(
        "- `speculative(gamma=2)` 0.90x: 2.00 tokens a call, but its calls read 3.0 tokens at 1.70"
    )
    assert (
        "the passes alone would give 1.04x" in told[0]
        and "0.40 ms a token (plain: 0.10), takes it" in told[0]
    )
    assert told[1].startswith("- `lookup` 0.70x") and "the passes alone give 0.69x; the rest is" in told[1]
    assert "| `llamacpp:plain` | 99 |" in text and "| target | 1.00 | 1.40 | 2.00 |" in text
