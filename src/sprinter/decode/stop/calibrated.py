"""The stop rule that learns while it decodes what a draft token's chance is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sprinter.decode.checks import ranged
from sprinter.decode.registry import STOP
from sprinter.decode.regression import Regression
from sprinter.decode.stop.base import StopRule
from sprinter.decode.threshold import reaches
from sprinter.decode.trust import State

__all__ = ["Calibrated"]


@STOP.rule("calibrated")
@dataclass(frozen=True, slots=True)
class Calibrated(StopRule):
    """Stops at a token whose expected chance of being accepted is below ``rate``.

    The chance is predicted by a logistic regression on the draft's certainty, fitted to the target's verdicts so far
    (``decode.regression``, as in the trust rule ``online``), so that the threshold means the same on every pair and
    text. Before the first verdict the certainty itself counts as the log-odds.

    Args:
        rate: least predicted chance at which a run goes on, in [0, 1].
        signal: one or more of margin, entropy and max_prob, joined by "+".
        memory: number of verdicts after which one has lost most of its weight.
    """

    rate: float = 0.5
    signal: str = "entropy"
    memory: int = 500

    def __post_init__(self) -> None:
        ranged(self, "rate", 0.0, 1.0)
        self._regression.check("calibrated")

    @property
    def _regression(self) -> Regression:
        return Regression(self.signal, self.memory)

    @property
    def needs(self) -> frozenset[str]:
        """The signals, of the raw law."""
        return frozenset(self._regression.names)

    @property
    def learns(self) -> bool:
        """True."""
        return True

    def start(self) -> State:
        """(weights ``[k + 1]``, bias last; their precision ``[k + 1, k + 1]``; number of verdicts)."""
        return self._regression.start()

    def possible(self, state: State) -> bool:
        """Whether the precision is symmetric and positive, and the count not negative."""
        return self._regression.possible(state)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide predicted chance < rate."""
        return ~reaches(self._regression.predict(signals, state), self.rate), state

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """One Newton step a verdict."""
        return self._regression.learn(signals, overlaps, state)
