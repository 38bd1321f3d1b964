"""A logistic regression from the draft's certainty or a gate's score to the overlap, fitted while decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import add, mul

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.checks import at_least, one_of
from sprinter.errors import UserError, did_you_mean

__all__ = ["PREDICTORS", "Fit", "Regression"]

_TINY = 1e-6  # of a probability or an entropy; float32 does not resolve smaller ones
_SCALE = 8.0  # nats: features are about 0 to 2
_PRIOR = 0.1  # precision of the weights before the first verdict
_CURVED = 0.05  # least curvature of a verdict: a surprise at a certain position must not overshoot


def _logit(probability: np.ndarray) -> np.ndarray:
    clipped = np.minimum(np.maximum(probability, _TINY), 1 - _TINY)
    odds: np.ndarray = np.log(clipped / (1 - clipped))
    return odds


_FEATURES: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "margin": lambda margin: np.minimum(margin, 16.0),
    "entropy": lambda entropy: -np.log(np.maximum(entropy, _TINY)),
    "max_prob": _logit,
    "gate": _logit,
}
"""Signal → certainty on a scale of log-odds, in nats: the larger, the more certain."""

PREDICTORS = frozenset(_FEATURES)
"""Names of the signals that a regression can read."""
Fit = tuple[Tensor, ...]
"""(weights ``[k + 1]``, bias last; their precision ``[k + 1, k + 1]``; number of verdicts)."""


@dataclass(frozen=True, slots=True)
class Regression:
    """Predicts β = Σ min(p, q), the chance that exact acceptance keeps a draft token, from signals.

    Args:
        signal: one or more of margin, entropy and max_prob (of the raw law) and gate (a gate's score), joined by "+".
        memory: number of verdicts after which one has lost most of its weight.
    """

    signal: str
    memory: int

    @property
    def names(self) -> list[str]:
        """The signals, one by one."""
        return self.signal.split("+")

    def check(self, what: str) -> None:
        """Raise a UserError unless the signals are known and differ, and the memory is a number of verdicts."""
        if not isinstance(self.signal, str):
            raise UserError(
                f"signal={self.signal!r} is not a name: give one or more of {', '.join(_FEATURES)}, joined by +"
            )
        for name in self.names:
            one_of(f"signal of {what}", name, _FEATURES)
        if len(set(self.names)) < len(self.names):
            raise did_you_mean(f"signal of {what}", self.signal, ["+".join(dict.fromkeys(self.names))])
        at_least("memory", self.memory, 1)

    def start(self) -> Fit:
        """Before the first verdict.

        The log-odds of β start as the (mean) certainty itself: of max q, for example, the expected overlap is max q.
        """
        return _fit(
            self._start, [[_PRIOR * (i == j) for j in range(self._count)] for i in range(self._count)], 0
        )

    def possible(self, fit: Fit) -> bool:
        """Whether the precision is symmetric and positive, and the count not negative."""
        _, precision, seen = fit
        symmetric = torch.allclose(precision, precision.T, rtol=1e-9)
        return symmetric and bool(torch.linalg.eigvalsh(precision)[0] > 0) and bool(seen >= 0)

    def predict(self, signals: Mapping[str, Tensor], fit: Fit) -> Tensor:
        """Expected overlap β, float64, of the signals' shape."""
        *weights, odds = fit[0].tolist()
        for weight, feature in zip(weights, self._features(signals), strict=True):
            odds = odds + weight * feature
        return torch.as_tensor((1 + np.tanh(odds / 2)) / 2)

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, fit: Fit) -> Fit:
        """One Newton step a verdict on the log-loss, with forgetting; what is forgotten returns to the start."""
        # In Python's floats: this runs in every round, and tensors take longer to be made than so few numbers to be
        # added up.
        weights, precision = fit[0].tolist(), fit[1].tolist()
        start, kept, forgotten = self._start, 1 - 1 / self.memory, _PRIOR / self.memory
        features = zip(*(feature.tolist() for feature in self._features(signals)), strict=True)
        for certain, overlap in zip(features, overlaps.tolist(), strict=True):
            feature = (*certain, 1.0)
            expected = (1 + math.tanh(sum(map(mul, weights, feature)) / 2)) / 2
            curvature, surprise = max(expected * (1 - expected), _CURVED), overlap - expected
            slope = []
            for i, (row, one) in enumerate(zip(precision, feature, strict=True)):
                curved = curvature * one
                precision[i] = [kept * old + curved * other for old, other in zip(row, feature, strict=True)]
                precision[i][i] += forgotten
                slope.append(surprise * one - forgotten * (weights[i] - start[i]))
            weights = [*map(add, weights, np.linalg.solve(precision, slope).tolist())]
        return _fit(weights, precision, int(fit[2]) + len(overlaps))

    @property
    def _count(self) -> int:
        return len(self.names) + 1

    @property
    def _start(self) -> list[float]:
        """Weights before the first verdict."""
        return [_SCALE / len(self.names)] * len(self.names) + [0.0]

    def _features(self, signals: Mapping[str, Tensor]) -> list[np.ndarray]:
        """One for each name, float64, of the signals' shape."""
        return [_FEATURES[name](signals[name].numpy().astype(np.float64)) / _SCALE for name in self.names]


def _fit(weights: list[float], precision: list[list[float]], seen: int) -> Fit:
    numbers = torch.float64
    return torch.tensor(weights, dtype=numbers), torch.tensor(precision, dtype=numbers), torch.tensor(seen)
