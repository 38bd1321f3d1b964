"""A logistic regression from the draft's certainty or a gate's score to the overlap, fitted while decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError

__all__ = ["PREDICTORS", "Fit", "Regression"]

_TINY = 1e-6  # of a probability or an entropy; float32 does not resolve smaller ones
_SCALE = 8.0  # nats: features are about 0 to 2
_PRIOR = 0.1  # precision of the weights before the first verdict
_CURVED = 0.05  # least curvature of a verdict: a surprise at a certain position must not overshoot

_FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "margin": lambda margin: margin.clamp(max=16.0),
    "entropy": lambda entropy: -entropy.clamp(min=_TINY).log(),
    "max_prob": lambda highest: torch.special.logit(highest, eps=_TINY),
    "gate": lambda score: torch.special.logit(score, eps=_TINY),
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
                f"signal={self.signal!r} is no name: give one or more of {', '.join(_FEATURES)}, joined by +"
            )
        for name in self.names:
            if name not in _FEATURES:
                raise did_you_mean(f"signal of {what}", name, list(_FEATURES))
        if len(set(self.names)) < len(self.names):
            raise did_you_mean(f"signal of {what}", self.signal, ["+".join(dict.fromkeys(self.names))])
        at_least("memory", self.memory, 1)

    def start(self) -> Fit:
        """Before the first verdict.

        The log-odds of β start as the (mean) certainty itself: of max q, for example, the expected overlap is max q.
        """
        weights, prior = _start(len(self.names))
        return torch.tensor(weights), torch.tensor(prior), torch.tensor(0)

    def possible(self, fit: Fit) -> bool:
        """Whether the precision is symmetric and positive, and the count not negative."""
        _, precision, seen = fit
        symmetric = torch.allclose(precision, precision.T, rtol=1e-9)
        return symmetric and bool(torch.linalg.eigvalsh(precision)[0] > 0) and bool(seen >= 0)

    def predict(self, signals: Mapping[str, Tensor], fit: Fit) -> Tensor:
        """Expected overlap β, float64, of the signals' shape."""
        return torch.sigmoid(self._features(signals) @ fit[0])

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, fit: Fit) -> Fit:
        """One Newton step a verdict on the log-loss, with forgetting; what is forgotten returns to the start."""
        weights, precision = (part.numpy() for part in fit[:2])
        start, prior = _start(len(self.names))
        forgotten = 1 / self.memory
        for feature, overlap in zip(self._features(signals).numpy(), overlaps.tolist(), strict=True):
            expected = (1 + math.tanh(weights @ feature / 2)) / 2
            curvature = max(expected * (1 - expected), _CURVED)
            seen = curvature * feature * feature[:, None]
            precision = (1 - forgotten) * precision + forgotten * prior + seen
            slope = (overlap - expected) * feature - forgotten * prior @ (weights - start)
            weights = weights + np.linalg.solve(precision, slope)
        return torch.from_numpy(weights), torch.from_numpy(precision), fit[2] + len(overlaps)

    def _features(self, signals: Mapping[str, Tensor]) -> Tensor:
        """``[..., k + 1]`` float64, the last one 1."""
        made = [_FEATURES[name](signals[name].double()) / _SCALE for name in self.names]
        return torch.stack([*made, torch.ones_like(made[0])], -1)


@cache
def _start(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and their precision before the first verdict; not to be changed."""
    weights = np.array([_SCALE / count] * count + [0.0])
    return weights, _PRIOR * np.eye(count + 1)
