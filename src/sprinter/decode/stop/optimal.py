"""The stop rule that weighs the expected gain of another draft token against its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import number
from sprinter.decode.costs import MEASURED, STEP
from sprinter.decode.registry import STOP
from sprinter.decode.stop.chance import ChanceRule
from sprinter.decode.trust import State

__all__ = ["Optimal"]

_ROUNDS = 20  # after which a round has lost most of its weight in the price
_TOKEN = 0.03
_VERDICTS = 100  # after which a verdict has lost most of its weight in the mean overlap
_FIRST = 8  # verdicts that the mean overlap of a new text weighs as much as


@STOP.rule("optimal")
@dataclass(frozen=True, slots=True)
class Optimal(ChanceRule):
    """Stops where one more draft token is expected to cost more time than it saves.

    In units of a target pass over one token a pass over n tokens costs 1 + token (n - 1), and a draft step costs
    ``step``. Another token is expected to add a_1 ... a_k a, where a_i is the predicted chance of draft token i and a
    the mean overlap of late: it is worth that many tokens at this text's own cost a token of late, and costs
    ``step`` + ``token``. As the gain falls with every token and the cost does not, looking one token ahead is enough.

    The chances come from a logistic regression on the draft's certainty, as in ``calibrated``.

    Args:
        step: cost of a draft step. token: further cost of each token that the target reads in a pass. "measured": on
            this machine, once for a pair; without models 0.25 and 0.03.
        signal: one or more of margin, entropy, max_prob and gate, joined by "+".
        memory: number of verdicts after which one has lost most of its weight in the regression.
    """

    chains_only: ClassVar[bool] = True  # its costs are those of chains

    step: float | str = number(STEP, 0.0, 100.0, MEASURED)
    token: float | str = number(_TOKEN, 0.0, 100.0, MEASURED)
    signal: str = "entropy"
    memory: int = 500

    @property
    def _costs(self) -> tuple[float, float]:
        """Of a draft step, and of a token that the target reads."""
        step, token = self.step, self.token
        return STEP if isinstance(step, str) else step, _TOKEN if isinstance(token, str) else token

    def start(self) -> State:
        """(chance that all of the run is accepted, copied tokens of the run, mean overlap, tokens, their cost, the
        regression's fit...).

        The tokens begin with one of plain decoding.
        """
        numbers = (1.0, 0.0, 0.7, 1.0, 1.0)
        return (*(torch.tensor(one, dtype=torch.float64) for one in numbers), *self.regression.start())

    def possible(self, state: State) -> bool:
        """Whether chance and overlap are in [0, 1], tokens and cost positive, and the fit possible."""
        chance, copied, overlap, tokens, cost = (float(part) for part in state[:5])
        known = 0 <= chance <= 1 and copied >= 0 and 0 <= overlap <= 1 and tokens > 0 and cost > 0
        return known and self.regression.possible(state[5:])

    def begin_round(self, state: State) -> State:
        """Nothing is drafted yet."""
        return (torch.ones_like(state[0]), torch.zeros_like(state[1]), *state[2:])

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide (expected tokens of one more draft token) x (cost a token) < its cost; copies end no run."""
        if bool(signals.get("copied", False)):
            return torch.tensor(False), (state[0], state[1] + 1, *state[2:])
        chance = state[0] * self.own_chance(signals, state)
        overlap, tokens, cost = map(float, state[2:5])
        return chance * (overlap * cost / tokens) < sum(self._costs), (chance, *state[1:])

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """Update the mean overlap and the regression."""
        weight = min(_VERDICTS, _FIRST + float(state[-1]))
        kept = weight / (weight + len(overlaps))
        # Sums in float32 exceed 1 by a rounding error.
        late = sum(min(1.0, one) for one in overlaps.tolist()) / len(overlaps)
        mean = torch.tensor(kept * float(state[2]) + (1 - kept) * late, dtype=torch.float64)
        return ChanceRule.learn(self, signals, overlaps, (*state[:2], mean, *state[3:]))

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """Count the round's tokens and their cost; trusted ones cost as they are read.

        A round of copies is not counted: it is cheap, and the price is that of the text between copies.
        """
        if state[1] > 0:
            return state
        kept = 1 - 1 / _ROUNDS
        tokens = kept * float(state[3]) + drafted - checked + accepted + 1
        cost = kept * float(state[4]) + 1 + drafted * sum(self._costs)
        return (*state[:3], *torch.tensor([tokens, cost], dtype=torch.float64).unbind(), *state[5:])
