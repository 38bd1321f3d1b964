"""The base class of stop rules that learn a draft token's chance while decoding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sprinter.decode.checks import Parameters
from sprinter.decode.registry import STOP
from sprinter.decode.regression import Regression
from sprinter.decode.stop.base import StopRule
from sprinter.decode.trust import State

__all__ = ["ChanceRule"]


class ChanceRule(StopRule):
    """Has a logistic regression, fitted to the target's verdicts, predict each draft token's chance of being accepted.

    The fit is at the end of the state (``decode.regression``, as in the trust rule ``online``). Subclasses are
    dataclasses with these two fields, as in ``Regression``.
    """

    signal: str
    memory: int

    @property
    def learns(self) -> bool:
        """From the target's verdicts."""
        return True

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        self.regression.check(str(STOP.name_of(type(self))))

    @property
    def regression(self) -> Regression:
        """The regression."""
        return Regression(self.signal, self.memory)

    @property
    def needs(self) -> frozenset[str]:
        """The signals, of the raw law."""
        return frozenset(self.regression.names)

    def own_chance(self, signals: Mapping[str, Tensor], state: State) -> Tensor:
        """Predicted chance of a token, given those before it in the run; of the signals' shape."""
        return self.regression.predict(signals, state[-3:])

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """One Newton step a verdict."""
        return (*state[:-3], *self.regression.learn(signals, overlaps, state[-3:]))
