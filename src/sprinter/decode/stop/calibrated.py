"""The stop rule that learns while it decodes what a draft token's chance is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.checks import number
from sprinter.decode.registry import STOP
from sprinter.decode.stop.chance import ChanceRule
from sprinter.decode.threshold import reaches
from sprinter.decode.trust import State

__all__ = ["Calibrated"]


@STOP.rule("calibrated")
@dataclass(frozen=True, slots=True)
class Calibrated(ChanceRule):
    """Stops at a token whose expected chance of being accepted, with all before it in the run, is below ``rate``.

    Each token's own chance is predicted by a logistic regression on the draft's certainty, fitted to the target's
    verdicts so far (``decode.regression``, as in the trust rule ``online``), so that the threshold means the same on
    every pair and text. Before the first verdict the certainty itself counts as the log-odds.

    Args:
        rate: minimum probability at which a run goes on, in [0, 1].
        signal: one or more of margin, entropy, max_prob and gate, joined by "+".
        memory: number of verdicts after which one has lost most of its weight.
    """

    rate: float = number(0.4, 0.0, 1.0)
    signal: str = "entropy"
    memory: int = 500

    def start(self) -> State:
        """(chance that all of the run is accepted, the regression's fit...)."""
        return (torch.ones((), dtype=torch.float64), *self.regression.start())

    def possible(self, state: State) -> bool:
        """Whether the chance is in [0, 1] and the fit possible."""
        return 0 <= float(state[0]) <= 1 and self.regression.possible(state[1:])

    def begin_round(self, state: State) -> State:
        """Nothing is drafted yet."""
        return (torch.ones_like(state[0]), *state[1:])

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide chance of the run < rate; copied tokens have no chance of their own and end no run."""
        if bool(signals.get("copied", False)):
            return torch.tensor(False), state
        chance = state[0] * self.own_chance(signals, state)
        return ~reaches(chance, self.rate), (chance, *state[1:])
