"""The answers of one arm, a number a prompt, and what the papers compute from them.

Intervals are 95 %, bootstrap over prompts, paired where two arms are compared; repeats of a prompt stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sprinter.bench.quality.judges import LikelihoodJudge
from sprinter.bench.statistics import Array, BootstrapInterval, bootstrap, ratio_of_ratios, ratio_of_sums
from sprinter.bench.suites import group_of_spec_bench

__all__ = ["Answers", "Quotient", "difference", "duel", "mean", "percent", "win_shares"]

Row = Mapping[str, Any]
"""An answer, as ``sprinter.bench.results`` describes it."""
Quotient = tuple[Array, Array]
"""Numerator and denominator of a ratio of sums over prompts, ``[prompts]`` each."""
T = TypeVar("T")


class Answers:
    """Rows of one arm, by prompt, in the order of their ids, so that arms are paired.

    Args:
        spec: the arm's method.
        rows: at least one; each prompt has the same number of repeats.
    """

    def __init__(self, spec: str, rows: Sequence[Row]) -> None:
        self.spec = spec
        self._rows: dict[str, list[Row]] = {}
        for row in sorted(rows, key=lambda row: (row["suite"], row["question_id"], row["repeat"])):
            self._rows.setdefault(f"{row['suite']} {row['question_id']}", []).append(row)

    def group(self, name: str) -> Answers:
        """Those of one of Spec-Bench's six groups."""
        rows = [row for same in self._rows.values() for row in same]
        return Answers(self.spec, [row for row in rows if group_of_spec_bench(row["category"]) == name])

    def each(self, of: Callable[[Row], T]) -> list[list[T]]:
        """A value of each answer: prompts, and within them repeats."""
        return [[of(row) for row in same] for same in self._rows.values()]

    def sum(self, of: Callable[[Row], float]) -> Array:
        """Sum over a prompt's answers, ``[prompts]``."""
        return np.array([sum(map(of, same)) for same in self._rows.values()], dtype=float)

    @property
    def prompts(self) -> int:
        """Number of prompts."""
        return len(self._rows)

    @property
    def tokens(self) -> Array:
        """New tokens."""
        return self.sum(lambda row: sum(row["choices"][0]["new_tokens"]))

    @property
    def seconds(self) -> Array:
        """Time, the prompt's own pass included, closing passes of the meter apart."""
        return self.sum(lambda row: sum(row["choices"][0]["wall_time"]))

    @property
    def after_the_first(self) -> Quotient:
        """Tokens that came after the first, and the seconds that they took: no prompt is read in them."""
        tokens = self.sum(lambda row: sum(late > one[0] for one in row["arrivals_ms"] for late in one))
        return tokens, self.sum(lambda row: sum(one[-1] - one[0] for one in row["arrivals_ms"] if one) / 1000)

    @property
    def rounds(self) -> Array:
        """Rounds of drafting."""
        return self.sum(lambda row: len(row["choices"][0]["accept_lengths"]))

    @property
    def drafted(self) -> Array:
        """Tokens of the text that the draft wrote: trusted or accepted."""
        return self.sum(lambda row: row["origins"].get("trusted", 0) + row["origins"].get("accepted", 0))

    @property
    def steps(self) -> Array:
        """Draft steps."""
        return self.sum(lambda row: sum(row["draft_steps"]))

    @property
    def calls(self) -> Array:
        """Target calls."""
        return self.sum(lambda row: sum(row["target_calls"]))

    @property
    def drift(self) -> Quotient:
        """Sum of metered drifts, and metered tokens."""
        sums = self.sum(lambda row: row["drift_sum"] or 0.0)
        return sums, np.maximum(self.sum(lambda row: row["drift_tokens"]), 1e-9)

    def flops(self, kind: str) -> Array:
        """FLOPs, counted by "passes", as the paper does, or by "tokens" that the passes read."""
        return self.sum(lambda row: row["flops"][kind])

    def quality(self, name: str) -> Quotient | None:
        """Sum of a measure, and answers that have it; None: none has."""
        have = [(row["quality"].get(name) for row in same) for same in self._rows.values()]
        values = [[value for value in same if value is not None] for same in have]
        if not any(values):
            return None
        kept = [same for same in values if same]
        return np.array([*map(sum, kept)], dtype=float), np.array([*map(len, kept)], dtype=float)

    @property
    def log_likelihood(self) -> Quotient:
        """Under the target's raw law: nats, and tokens."""
        return self.sum(lambda row: row["quality"]["log_likelihood"]), self.tokens

    @property
    def scores(self) -> Array:
        """Log-likelihood a token of each answer: ``[prompts, repeats]``."""
        return np.array(self.each(lambda row: row["quality"]["log_likelihood_per_token"]))

    def speed_over(self, base: Answers) -> BootstrapInterval:
        """Tokens/s over another arm's."""
        return ratio_of_ratios((self.tokens, self.seconds), (base.tokens, base.seconds))


def win_shares(ours: Answers, theirs: Answers, ties: float = 1.0) -> Array:
    """Share of comparisons that ``ours`` wins, a tie counting ``ties``: every answer with every answer, ``[prompts]``.

    The judge is the bench's offline one: log-likelihood a token under the target; what lies within its band ties.
    """
    gaps = ours.scores[:, :, None] - theirs.scores[:, None, :]
    band = LikelihoodJudge().band
    shares: Array = ((gaps > band) + ties * (np.abs(gaps) <= band)).mean((1, 2))
    return shares


def duel(ours: Answers, theirs: Answers) -> tuple[BootstrapInterval, BootstrapInterval]:
    """Per cent of prompts won (half for a draw), per cent of comparisons won (half for a tie)."""
    shares = win_shares(ours, theirs, ties=0.5)
    prompts = (shares > 0.5) + 0.5 * (shares == 0.5)
    return mean(100 * prompts), mean(100 * shares)


def mean(values: Array) -> BootstrapInterval:
    """Mean over prompts."""
    return ratio_of_sums(values, np.ones(len(values)))


def percent(of: BootstrapInterval) -> BootstrapInterval:
    """In per cent."""
    value, low, high = of
    return 100 * value, None if low is None else 100 * low, None if high is None else 100 * high


def difference(a: Quotient, b: Quotient) -> BootstrapInterval:
    """Σa/Σb of the first less that of the second, paired by prompt."""

    def statistic(rows: NDArray[np.int64]) -> Array:
        left, right = (top[rows].sum(-1) / bottom[rows].sum(-1) for top, bottom in (a, b))
        return np.asarray(left - right)

    return bootstrap(statistic, len(a[0]))
