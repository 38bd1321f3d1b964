"""Summarise rows: one summary per arm, suite and temperature, with 95 % bootstrap intervals over prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sprinter.bench.quality.metrics import intervals
from sprinter.bench.statistics import ratio_of_ratios, ratio_of_sums

__all__ = ["ALL", "Group", "groups", "summarise"]

ALL = "all"
"""Name of the summary over all suites."""

SummaryRows = Sequence[Mapping[str, Any]]
PromptKey = tuple[str, str]
"""Suite and sample."""


class Group:
    """Rows of one arm at one temperature, grouped by prompt: repeats and turns of a prompt are summed.

    Args:
        rows: rows of one arm and temperature.
        prompts: prompts to include, in order.
    """

    def __init__(self, rows: SummaryRows, prompts: Sequence[PromptKey]) -> None:
        self._by_prompt: dict[PromptKey, list[Mapping[str, Any]]] = {prompt: [] for prompt in prompts}
        for row in rows:
            self._by_prompt[row["suite"], row["question_id"]].append(row)
        self.rows = list(rows)
        self.tokens = self.sums(lambda row: sum(row["choices"][0]["new_tokens"]))
        self.seconds = self.sums(lambda row: sum(row["choices"][0]["wall_time"]))
        self.scored = self.sums(lambda row: row["drift_tokens"])
        metered = self.scored.sum() > 0 and all(row["drift_sum"] is not None for row in rows)
        self.drifts = self.sums(lambda row: row["drift_sum"]) if metered else None

    @property
    def by_prompt(self) -> list[list[Mapping[str, Any]]]:
        """Rows of each prompt."""
        return list(self._by_prompt.values())

    @property
    def prompts(self) -> set[PromptKey]:
        """Suite and sample of each row."""
        return set(self._by_prompt)

    def restrict(self, prompts: Sequence[PromptKey]) -> Group:
        """The same arm on fewer prompts."""
        return Group([row for prompt in prompts for row in self._by_prompt.get(prompt, ())], prompts)

    def sums(self, value: Callable[[Mapping[str, Any]], float]) -> NDArray[np.float64]:
        """Sum of ``value`` over the rows of each prompt, ``[prompts]``."""
        return np.array([sum(map(value, rows)) for rows in self._by_prompt.values()], dtype=float)

    def counts(self, name: str) -> NDArray[np.float64] | None:
        """Sums of a count per turn, ``[prompts]``; None if an answer lacks the count."""
        if any(None in row[name] for row in self.rows):
            return None
        return self.sums(lambda row: sum(row[name]))

    @property
    def asked(self) -> set[tuple[str, str, int]]:
        """Suite, sample and repeat of each answer."""
        return {(row["suite"], row["question_id"], row["repeat"]) for row in self.rows}

    @property
    def answered(self) -> bool:
        """Whether there is any new token; without one no number per token exists."""
        return bool(self.tokens.sum() > 0)

    @property
    def speed(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Tokens and seconds per prompt, as ``ratio_of_ratios`` takes them."""
        return self.tokens, self.seconds


SummaryKey = tuple[str, str, float]
"""Arm, suite (or ``ALL``), temperature."""


def groups(rows: Iterable[Mapping[str, Any]]) -> dict[SummaryKey, Group]:
    """Groups of all arms, suites and temperatures.

    All arms of a suite and temperature are summarised over the prompts and repeats that every one of them answered, so
    that they can be compared; an arm that failed part-way is summarised over its own.
    """
    rows = list(rows)
    wanted = Counter((row["suite"], row["temperature"], row["model_id"]) for row in rows)
    most = {key[:2]: max(n for other, n in wanted.items() if other[:2] == key[:2]) for key in wanted}
    whole = {key for key, n in wanted.items() if n == most[key[:2]]}
    answered = Counter(_question(row) for row in rows if _owner(row) in whole)
    arms = Counter(key[:2] for key in whole)

    def common(row: Mapping[str, Any]) -> bool:
        return _owner(row) not in whole or answered[_question(row)] == arms[row["suite"], row["temperature"]]

    parts: dict[SummaryKey, list[Mapping[str, Any]]] = {}
    for row in rows:
        if common(row):
            for suite in (row["suite"], ALL):
                parts.setdefault((row["model_id"], suite, row["temperature"]), []).append(row)
    if len({row["suite"] for row in rows}) == 1:
        parts = {key: part for key, part in parts.items() if key[1] != ALL}
    return {
        key: Group(part, sorted({(row["suite"], row["question_id"]) for row in part}))
        for key, part in parts.items()
    }


def _owner(row: Mapping[str, Any]) -> tuple[str, float, str]:
    return row["suite"], row["temperature"], row["model_id"]


def _question(row: Mapping[str, Any]) -> tuple[str, float, str, int]:
    return row["suite"], row["temperature"], row["question_id"], row["repeat"]


def summarise(
    rows: Iterable[Mapping[str, Any]], engines: Mapping[str, str], bases: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """The "summary" of a results file; see ``sprinter.bench.results``.

    Args:
        rows: rows of all arms.
        engines: engine of each arm.
        bases: arms that speeds are reported relative to, if they took part.
    """
    found = groups(rows)
    summaries = []
    for (arm, suite, temperature), group in found.items():
        speeds = {}
        for base in bases:
            other = found.get((base, suite, temperature))
            if other is not None and other.asked == group.asked and other.answered and group.answered:
                speeds[base] = ratio_of_ratios(group.speed, other.speed)
        facts = {"arm": arm, "engine": engines.get(arm, "?"), "suite": suite, "temperature": temperature}
        summaries.append(facts | _summary(group) | {"speed_over": speeds})
    return summaries


def _summary(group: Group) -> dict[str, Any]:
    tokens, rows = group.tokens, group.rows
    new = float(tokens.sum())
    calls, steps = group.counts("target_calls"), group.counts("draft_steps")
    lengths = [n for row in rows for n in row["choices"][0]["accept_lengths"]]
    rounds = group.sums(lambda row: len(row["choices"][0]["accept_lengths"]))
    origins: Counter[str] = sum((Counter(row["origins"]) for row in rows), Counter())
    judged = origins["accepted"] + origins["replacement"]
    traced = sum(origins.values())
    drafted = origins["trusted"] + origins["accepted"]
    ttft = [1000 * t for row in rows for t in row["ttft_s"] if t is not None]
    arrivals = [times for row in rows for times in row["arrivals_ms"] if len(times) > 1]
    gaps = np.concatenate([np.diff(times) for times in arrivals]) if arrivals else np.empty(0)
    seconds = float(group.seconds.sum())
    asked: Counter[str] = sum((Counter(row.get("remote")) for row in rows), Counter())
    moved = asked["sent_bytes"] + asked["received_bytes"]
    each = {"round_trips": asked["round_trips"], "bytes": moved, "paid": asked["paid_tokens"]}
    return {
        "lossless": rows[0]["lossless"], "prompts": len(tokens), "answers": len(rows), "new_tokens": int(new),
        "seconds": seconds, "tokens_per_s": new / seconds, "ttft_ms": _quantiles(ttft), "gap_ms": _quantiles(gaps),
        "target_calls_per_token": ratio_of_sums(calls, tokens) if calls is not None and new else None,
        "draft_steps_per_token": float(steps.sum()) / new if steps is not None and new else None,
        "mean_drift": None if group.drifts is None else ratio_of_sums(group.drifts, group.scored),
        "drift_coverage": sum(row["drift_tokens"] for row in rows) / max(new, 1.0),
        "drafted_share": drafted / traced if traced else None,
        "trusted_share": origins["trusted"] / traced if traced else None,
        "tokens_per_round": ratio_of_sums(tokens, rounds) if lengths else None,
        "round_histogram": np.bincount(lengths).tolist() if lengths else [],
        "accepted_of_checked": origins["accepted"] / judged if judged else None,
        "quality": intervals([[row.get("quality", {}) for row in of] for of in group.by_prompt]),
        **{f"{name}_per_token": count / new if asked and new else None for name, count in each.items()},
    }  # fmt: skip


def _quantiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float] | None:
    if not len(values):
        return None
    p50, p95 = np.percentile(values, [50, 95])
    return {"p50": float(p50), "p95": float(p95)}
