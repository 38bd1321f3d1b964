"""The trust rule that learns while it decodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.checks import Parameters, count, number
from sprinter.decode.registry import TRUST
from sprinter.decode.regression import Regression
from sprinter.decode.threshold import reaches
from sprinter.decode.trust.base import State, TrustRule

__all__ = ["Online"]


@TRUST.rule("online")
@dataclass(frozen=True, slots=True)
class Online(TrustRule):
    """Trusts x where a logistic regression, fitted to the target's verdicts so far, expects an overlap >= tau.

    The label of a position is β = Σ min(p, q), the chance that exact acceptance keeps a draft token there: what a gate
    predicts, so tau means the same. The target scores every draft token of a round, trusted ones too, one round late at
    most; the fit is then updated by a Newton step a verdict. It starts from "nobody is trusted" and depends on prefixes
    alone, not on x. Nothing is trained before: the state begins with a text, or goes on from the ``rules`` of another.

    Args:
        signal: one or more of margin, entropy, max_prob and gate, joined by "+".
        tau: least predicted overlap, in [0, 1].
        after: number of verdicts before the first token may be trusted.
        memory: number of verdicts after which one has lost most of its weight; text changes.
    """

    signal: str = "entropy"
    tau: float = number(0.6, 0.0, 1.0)
    after: int = count(16)
    memory: int = 500
    learns: ClassVar[bool] = True
    dial: ClassVar[str | None] = "tau"

    def __post_init__(self) -> None:
        self._regression.check("online")
        Parameters.__post_init__(self)

    @property
    def _regression(self) -> Regression:
        return Regression(self.signal, self.memory)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signals, of the raw law."""
        return frozenset(self._regression.names)

    @property
    def certainty(self) -> tuple[str, ...]:
        """The signals."""
        return tuple(self._regression.names)

    def start(self) -> State:
        """(weights ``[k + 1]``, bias last; their precision ``[k + 1, k + 1]``; number of verdicts)."""
        return self._regression.start()

    def possible(self, state: State) -> bool:
        """Whether the precision is symmetric and positive, and the count not negative."""
        return self._regression.possible(state)

    def predict(self, signals: Mapping[str, Tensor], state: State) -> Tensor:
        """Expected overlap β, float64, of the signals' shape."""
        return self._regression.predict(signals, state)

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide predicted overlap >= tau, from ``after`` verdicts on."""
        return reaches(self.predict(signals, state), self.tau) & (state[2] >= self.after), state

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """One Newton step a verdict."""
        return self._regression.learn(signals, overlaps, state)
