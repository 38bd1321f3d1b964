"""The trust rule that learns while it decodes: a logistic regression on the draft's certainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.checks import at_least, ranged
from sprinter.decode.registry import TRUST, did_you_mean
from sprinter.decode.threshold import reaches
from sprinter.decode.trust.base import State, TrustRule

__all__ = ["Online"]

_TINY = 1e-6  # of a probability or an entropy; float32 does not resolve smaller ones
_SCALE = 8.0  # nats: features are about 0 to 2
_PRIOR = 0.1  # precision of the weights before the first verdict
_CURVED = 0.05  # least curvature of a verdict: a surprise at a certain position must not overshoot

_FEATURES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "margin": lambda margin: margin.clamp(max=16.0),
    "entropy": lambda entropy: -entropy.clamp(min=_TINY).log(),
    "max_prob": lambda highest: torch.special.logit(highest, eps=_TINY),
}
"""Signal → certainty on a scale of log-odds, in nats: the larger, the more certain."""


@TRUST.rule("online")
@dataclass(frozen=True, slots=True)
class Online(TrustRule):
    """Trusts x where a logistic regression, fitted to the target's verdicts so far, expects an overlap >= tau.

    The label of a position is β = Σ min(p, q), the chance that exact acceptance keeps a draft token there: what a gate
    predicts, so tau means the same. The target scores every draft token of a round, trusted ones too, one round late at
    most; the fit is then updated by a Newton step a verdict. It starts from "nobody is trusted" and depends on prefixes
    alone, not on x. Nothing is trained before: the state begins with a text, or goes on from the ``rules`` of another.

    Args:
        signal: one or more of margin, entropy and max_prob, joined by "+".
        tau: least predicted overlap, in [0, 1].
        after: number of verdicts before the first token may be trusted.
        memory: number of verdicts after which one has lost most of its weight; text changes.
    """

    signal: str = "entropy"
    tau: float = 0.6
    after: int = 16
    memory: int = 500
    learns: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in _FEATURES:
                raise did_you_mean("signal of online", name, list(_FEATURES))
        if len(set(self.names)) < len(self.names):
            raise did_you_mean("signal of online", self.signal, ["+".join(dict.fromkeys(self.names))])
        ranged(self, "tau", 0.0, 1.0)
        at_least("after", self.after, 1)
        at_least("memory", self.memory, 1)

    @property
    def names(self) -> list[str]:
        """The signals, one by one."""
        return self.signal.split("+")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals, of the raw law."""
        return frozenset(self.names)

    def start(self) -> State:
        """(weights ``[k + 1]``, bias last; their precision ``[k + 1, k + 1]``; number of verdicts).

        The log-odds of β start as the (mean) certainty itself: of max q, for example, the expected overlap is max q.
        """
        count = len(self.names)
        weights = torch.full((count + 1,), _SCALE / count, dtype=torch.float64)
        weights[-1] = 0.0
        return weights, _PRIOR * torch.eye(count + 1, dtype=torch.float64), torch.tensor(0)

    def possible(self, state: State) -> bool:
        """Whether the precision is symmetric and positive, and the count not negative."""
        _, precision, seen = state
        symmetric = torch.allclose(precision, precision.T, rtol=1e-9)
        return symmetric and bool(torch.linalg.eigvalsh(precision)[0] > 0) and bool(seen >= 0)

    def predict(self, signals: Mapping[str, Tensor], state: State) -> Tensor:
        """Expected overlap β, float64, of the signals' shape."""
        return torch.sigmoid(self._features(signals) @ state[0])

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide predicted overlap >= tau, from ``after`` verdicts on."""
        return reaches(self.predict(signals, state), self.tau) & (state[2] >= self.after), state

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """One Newton step a verdict on the log-loss, with forgetting; what is forgotten returns to the start."""
        weights, precision = (part.numpy() for part in state[:2])
        start, prior = (part.numpy() for part in self.start()[:2])
        forgotten = 1 / self.memory
        for feature, overlap in zip(self._features(signals).numpy(), overlaps.tolist(), strict=True):
            expected = (1 + np.tanh(weights @ feature / 2)) / 2
            curvature = max(expected * (1 - expected), _CURVED)
            seen = curvature * np.outer(feature, feature)
            precision = (1 - forgotten) * precision + forgotten * prior + seen
            slope = (overlap - expected) * feature - forgotten * prior @ (weights - start)
            weights = weights + np.linalg.solve(precision, slope)
        return torch.from_numpy(weights), torch.from_numpy(precision), state[2] + len(overlaps)

    def _features(self, signals: Mapping[str, Tensor]) -> Tensor:
        """``[..., k + 1]`` float64, the last one 1."""
        made = [_FEATURES[name](signals[name].double()) / _SCALE for name in self.names]
        return torch.stack([*made, torch.ones_like(made[0])], -1)
