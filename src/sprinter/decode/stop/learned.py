"""Stop rules that read a trained head: SpecDec++ and DISCO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.checks import at_least, ranged
from sprinter.decode.registry import STOP
from sprinter.decode.stop.base import StopRule
from sprinter.decode.threshold import reaches
from sprinter.decode.trust import State

__all__ = ["Disco", "SpecDec"]


@STOP.rule("specdec++")
@dataclass(frozen=True, slots=True)
class SpecDec(StopRule):
    """Stop when 1 − Π p̂ > h: a refusal in this run is likely enough (SpecDec++, Huang et al. 2024, equation 3.3).

    p̂(x) is a head's estimate of the chance min(1, p/q) that x is accepted. The head reads the draft's state at x, so x
    is run through the draft before the rule is asked. The reference code scores one token late; here the run ends with
    the token that crosses the threshold.

    Args:
        h: threshold, probability.
        least: tokens of a run before the rule may stop it.
    """

    h: float = 0.7
    least: int = 2

    def __post_init__(self) -> None:
        ranged(self, "h", 0.0, 1.0)
        at_least("least", self.least, 1)

    @property
    def needs(self) -> frozenset[str]:
        """p̂."""
        return frozenset({"specdec++"})

    @property
    def sees_token(self) -> bool:
        """p̂ depends on x."""
        return True

    def start(self) -> State:
        """(Π p̂,), float64."""
        return (torch.ones((), dtype=torch.float64),)

    def possible(self, state: State) -> bool:
        """A chance."""
        return 0 <= float(state[0]) <= 1

    def begin_round(self, state: State) -> State:
        """The product begins anew."""
        return (torch.ones_like(state[0]),)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """1 − Π p̂ > h, from ``least`` tokens on."""
        product = state[0] * signals["specdec++"]
        return (1 - product > self.h) & (signals["drafted"] >= self.least), (product,)


@STOP.rule("disco")
@dataclass(frozen=True, slots=True)
class Disco(StopRule):
    """Stop when a small network expects a refusal (DISCO, Mamou et al. 2024): its score < threshold.

    The network reads q's largest probabilities, its entropy and the place in the run; it does not see x.

    Args:
        threshold: least chance of acceptance, in [0, 1].
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        ranged(self, "threshold", 0.0, 1.0)

    @property
    def needs(self) -> frozenset[str]:
        """The network's score."""
        return frozenset({"disco"})

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """score < threshold."""
        return ~reaches(signals["disco"], self.threshold), state
