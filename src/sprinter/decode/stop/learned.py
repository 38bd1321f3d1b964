"""Stop rules that read a trained head: SpecDec++ and DISCO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import count, number
from sprinter.decode.registry import STOP
from sprinter.decode.stop.base import StopRule
from sprinter.decode.threshold import reaches
from sprinter.decode.trust import State

__all__ = ["Disco", "SpecDec"]


@STOP.rule("specdec++")
@dataclass(frozen=True, slots=True)
class SpecDec(StopRule):
    """Stops when 1 − Π p̂ > h, the estimated probability of a rejection in this run (SpecDec++, Huang et al. 2024,
    equation 3.3).

    p̂(x) is a head's estimate of min(1, p/q), the acceptance probability of x. The head reads the draft's hidden state
    at x, so the draft model reads x before the decision. The reference code scores one token late; here the run ends
    with the token that crosses the threshold.

    Args:
        h: threshold, probability.
        least: minimum length of a run, tokens.
    """

    h: float = number(0.7, 0.0, 1.0)
    least: int = count(2)
    needs: ClassVar[frozenset[str]] = frozenset({"specdec++"})  # the head's score p̂
    sees_token: ClassVar[bool] = True  # p̂ depends on x

    def start(self) -> State:
        """(Π p̂,) in float64, 1 at the start."""
        return (torch.ones((), dtype=torch.float64),)

    def possible(self, state: State) -> bool:
        """Whether the product is in [0, 1]."""
        return 0 <= float(state[0]) <= 1

    def begin_round(self, state: State) -> State:
        """Reset the product to 1."""
        return (torch.ones_like(state[0]),)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide 1 − Π p̂ > h, from ``least`` tokens on."""
        product = state[0] * signals["specdec++"]
        return (1 - product > self.h) & (signals["drafted"] >= self.least), (product,)


@STOP.rule("disco")
@dataclass(frozen=True, slots=True)
class Disco(StopRule):
    """Stops when a small network's predicted acceptance probability is below a threshold (DISCO, Mamou et al. 2024).

    The network reads q's largest probabilities, its entropy and the position in the run; it does not see x.

    Args:
        threshold: minimum predicted acceptance probability, in [0, 1].
    """

    threshold: float = number(0.5, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"disco"})  # the network's score

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide score < threshold."""
        return ~reaches(signals["disco"], self.threshold), state
