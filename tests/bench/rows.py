"""Rows as a run would leave them, from a few numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def row(
    arm: str,
    question: str,
    seconds: float,
    *,
    tokens: int = 20,
    suite: str = "toy",
    temperature: float = 1.0,
    repeat: int = 0,
    calls: int = 10,
    drift: float = 0.0,
) -> dict[str, Any]:
    """One answer of one turn, two tokens a round, the clock evenly ticking."""
    choice = {
        "index": 0, "turns": ["text"], "decoding_steps": [calls], "new_tokens": [tokens], "wall_time": [seconds],
        "accept_lengths": [2] * calls,
    }  # fmt: skip
    return {
        "question_id": question, "category": "c", "model_id": arm, "choices": [choice], "tstamp": 0.0, "suite": suite,
        "temperature": temperature, "repeat": repeat, "seed": 0, "lossless": drift == 0, "prompt_tokens": [5],
        "ttft_s": [seconds / tokens], "arrivals_ms": [[1000 * seconds * (i + 1) / tokens for i in range(tokens)]],
        "target_calls": [calls], "draft_steps": [tokens],
        "origins": {"accepted": tokens - 2 * calls // 2, "replacement": calls // 2, "bonus": calls - calls // 2},
        "drift_sum": drift * tokens, "drift_tokens": tokens, "token_ids": [list(range(tokens))],
    }  # fmt: skip


def rows_of(arm: str, times: np.ndarray, **options: Any) -> list[dict[str, Any]]:
    """One row a prompt."""
    return [row(arm, f"q{i}", float(seconds), **options) for i, seconds in enumerate(times)]


def results_of(rows: list[dict[str, Any]], bases: tuple[str, ...] = ("plain",)) -> dict[str, Any]:
    """The part of a results file that comparing reads."""
    return {"schema": "sprinter-bench/1", "rows": rows, "settings": {"bases": list(bases)}}
