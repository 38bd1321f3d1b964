"""Quality and speed of FSD's arms: the target's log-likelihood in place of accuracy, and the gap to the draft."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

import sprinter
from benchmarks.papers.arms import Group, likelihoods
from sprinter.bench.statistics import BootstrapInterval, bootstrap, ratio_of_ratios


@dataclass(frozen=True)
class Numbers:
    """Of one arm, a prompt: log-likelihood (sum over tokens), tokens, seconds, drift, draft's tokens, rounds."""

    score: np.ndarray
    tokens: np.ndarray
    busy_s: np.ndarray
    drift: np.ndarray
    drafted: np.ndarray
    rounds: np.ndarray

    @classmethod
    def of(cls, pair: sprinter.Pair, group: Group) -> Numbers:
        """Of a group's answers."""
        drift = group.sum(lambda out: (out.stats.mean_drift or 0.0) * out.stats.new_tokens)
        score = likelihoods(pair, group).sum(0)
        return cls(score, group.tokens, group.busy_s, drift, group.drafted, group.sum("rounds"))

    @classmethod
    def joined(cls, parts: list[Numbers]) -> Numbers:
        """All data sets together."""
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))

    @property
    def quality(self) -> tuple[np.ndarray, np.ndarray]:
        """Log-likelihood a token, as a ratio of sums."""
        return self.score, self.tokens

    def speed_over(self, base: Numbers) -> BootstrapInterval:
        """Tokens/s over another arm's."""
        return ratio_of_ratios((self.tokens, self.busy_s), (base.tokens, base.busy_s))


def of_gap(a: Numbers, b: Numbers, target: Numbers, draft: Numbers) -> BootstrapInterval:
    """Log-likelihood a token that ``a`` has less than ``b``, as a share of the gap between target and draft."""

    def statistic(rows: np.ndarray) -> np.ndarray:
        qa, qb, qt, qd = (x.score[rows].sum(-1) / x.tokens[rows].sum(-1) for x in (a, b, target, draft))
        return (qb - qa) / (qt - qd)

    return bootstrap(statistic, len(a.tokens))


def over_allocation(one: Numbers, target: Numbers, draft: Numbers) -> BootstrapInterval:
    """Log-likelihood a token beyond that of whole texts by target or draft, mixed to be as fast (section 5.3)."""

    def statistic(rows: np.ndarray) -> np.ndarray:
        times = [x.busy_s[rows].sum(-1) / x.tokens[rows].sum(-1) for x in (one, target, draft)]
        scores = [x.score[rows].sum(-1) / x.tokens[rows].sum(-1) for x in (one, target, draft)]
        share = (times[1] - times[0]) / (times[1] - times[2])  # below 0: slower than the target alone
        return scores[0] - (scores[1] + np.clip(share, 0, 1) * (scores[2] - scores[1]))

    return bootstrap(statistic, len(one.tokens))
