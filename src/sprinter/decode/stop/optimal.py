"""The stop rule that weighs the expected gain of another draft token against its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import Parameters, number
from sprinter.decode.costs import ENTROPY, MEAN, MEASURED, STEP
from sprinter.decode.registry import STOP
from sprinter.decode.regression import Regression
from sprinter.decode.stop.chance import ChanceRule
from sprinter.decode.trust import State

__all__ = ["Optimal"]

_ROUNDS = 20  # after which a round has lost most of its weight in the price
_TOKEN = 0.03
_VERDICTS = 100  # after which a verdict has lost most of its weight in the mean overlap
_FIRST = 8  # verdicts that the mean overlap of a new text weighs as much as
_LONGEST = 40  # tokens of a run whose length is known when it begins
_NUMBERS = torch.arange(_LONGEST + 1, dtype=torch.float64).unbind()  # never changed in place


@STOP.rule("optimal")
@dataclass(frozen=True, slots=True)
class Optimal(ChanceRule):
    """Stops where one more draft token is expected to cost more time than it saves.

    In units of a target pass over one token a pass over n > 1 tokens costs 1 + verify + token (n - 1), and a draft step
    costs ``step``. Another token is expected to add a_1 ... a_k a, where a_i is the predicted chance of draft token i
    and a the mean overlap of late: it is worth that many tokens at this text's own cost a token of late, and costs
    ``step`` + ``token``. As the gain falls with every token and the cost does not, looking one token ahead is enough.

    The chances come from a logistic regression on the draft's certainty, as in ``calibrated``. With ``signal="mean"``
    each is the mean acceptance of late, a: then the length of a run is known when it begins, the one at which a token
    costs least, and the draft writes it without being asked in between.

    Args:
        step: cost of a draft step. token: further cost of each token that the target reads in a pass. verify: further
            cost of a pass over more than one token. "measured": on this machine, once for a pair; without models 0.25,
            0.03 and 0.
        signal: one or more of margin, entropy, max_prob and gate, joined by "+"; "mean"; "measured": mean where the
            regression would cost more than a few hundredths of a pass, else entropy.
        memory: number of verdicts after which one has lost most of its weight in the regression.
    """

    chains_only: ClassVar[bool] = True  # its costs are those of chains

    step: float | str = number(STEP, 0.0, 100.0, MEASURED)
    token: float | str = number(_TOKEN, 0.0, 100.0, MEASURED)
    signal: str = "entropy"
    memory: int = 500
    verify: float | str = number(0.0, 0.0, 100.0, MEASURED)

    @property
    def _costs(self) -> tuple[float, float]:
        """Of one more draft token, and of the first in addition."""
        step, token, verify = self.step, self.token, self.verify
        more = (STEP if isinstance(step, str) else step) + (_TOKEN if isinstance(token, str) else token)
        return more, 0.0 if isinstance(verify, str) else verify

    def __post_init__(self) -> None:
        if self.signal == MEAN:
            Parameters.__post_init__(self)
        else:
            ChanceRule.__post_init__(self)

    @property
    def regression(self) -> Regression:
        """The regression; with "mean" it is not read."""
        return Regression(ENTROPY if self.signal in (MEASURED, MEAN) else self.signal, self.memory)

    @property
    def learns(self) -> bool:
        """Whether a regression learns; the mean acceptance is counted."""
        return self.signal != MEAN

    @property
    def needs(self) -> frozenset[str]:
        """The signals, of the raw law."""
        return frozenset(self.regression.names) if self.learns else frozenset()

    def start(self) -> State:
        """(chance that all of the run is accepted, copied tokens of the run, mean overlap, tokens, their cost, the
        regression's fit... or, with "mean", the number of verdicts).

        The tokens begin with one of plain decoding. With "mean" the length of the run is in place of the chance.
        """
        numbers = (1.0, 0.0, 0.7, 1.0, 1.0)
        fit = self.regression.start() if self.learns else (torch.tensor(0),)
        return (*(torch.tensor(one, dtype=torch.float64) for one in numbers), *fit)

    def possible(self, state: State) -> bool:
        """Whether chance and overlap are in [0, 1], tokens and cost positive, and the fit possible."""
        chance, copied, overlap, tokens, cost = (float(part) for part in state[:5])
        known = (
            0 <= chance <= (1 if self.learns else _LONGEST) and 0 <= overlap <= 1 and tokens > 0 and cost > 0
        )
        fits = self.regression.possible(state[5:]) if self.learns else bool(state[5] >= 0)
        return known and copied >= 0 and fits

    def begin_round(self, state: State) -> State:
        """Nothing is drafted yet."""
        begun = 1 if self.learns else self._length(float(state[2]))
        return (_NUMBERS[begun], _NUMBERS[0], *state[2:])

    def _length(self, chance: float) -> int:
        """Of the run at which a token costs least, if each is kept with this chance: behind it, none costs less."""
        more, first = self._costs
        spent, tokens, kept, least = 1 + first, 1.0, 1.0, inf
        for drafted in range(1, _LONGEST + 1):
            spent, kept = spent + more, kept * chance
            tokens += kept
            if spent / tokens >= least:
                return drafted - 1
            least = spent / tokens
        return _LONGEST

    def ahead(self, state: State) -> int | None:
        """With "mean", the length of the run."""
        return None if self.learns else int(state[0])

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide (expected tokens of one more draft token) x (cost a token) < its cost; copies end no run."""
        if bool(signals.get("copied", False)):
            return torch.tensor(False), (state[0], state[1] + 1, *state[2:])
        if not self.learns:
            return signals["drafted"] - state[1] >= state[0], state
        chance = state[0] * self.own_chance(signals, state)
        overlap, tokens, cost = map(float, state[2:5])
        return chance * (overlap * cost / tokens) < self._costs[0], (chance, *state[1:])

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """Update the mean overlap and the regression."""
        # Sums in float32 exceed 1 by a rounding error.
        late = sum(min(1.0, one) for one in overlaps.tolist())
        mean = _mean(state, late, len(overlaps))
        return ChanceRule.learn(self, signals, overlaps, (*state[:2], mean, *state[3:]))

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """Count the round's tokens and their cost; trusted ones cost as they are read.

        A round of copies is not counted: it is cheap, and the price is that of the text between copies.
        """
        if float(state[1]) > 0:
            return state
        if not self.learns:  # nothing reads its tokens and their cost
            if not (verdicts := min(accepted + 1, checked)):
                return state
            return (*state[:2], _mean(state, accepted, verdicts), *state[3:5], state[5] + verdicts)
        kept = 1 - 1 / _ROUNDS
        tokens = kept * float(state[3]) + drafted - checked + accepted + 1
        more, first = self._costs
        cost = kept * float(state[4]) + 1 + drafted * more + (first if drafted else 0.0)
        return (*state[:3], *torch.tensor([tokens, cost], dtype=torch.float64).unbind(), *state[5:])


def _mean(state: State, sum: float, count: int) -> Tensor:
    """The mean overlap after so many verdicts more."""
    weight = min(_VERDICTS, _FIRST + float(state[-1]))
    kept = weight / (weight + count)
    return torch.tensor(kept * float(state[2]) + (1 - kept) * sum / count, dtype=torch.float64)
