"""Stop rules that read the confidence of the draft law: confidence, BiLD's fallback, SVIP, AdaEDL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import Parameters, count, number
from sprinter.decode.registry import STOP
from sprinter.decode.signals import ENDINGS
from sprinter.decode.stop.base import StopRule
from sprinter.decode.trust import State
from sprinter.errors import UserError

__all__ = ["AdaEdl", "BildFallback", "Confidence", "Svip"]


class LawRule(StopRule):
    """Reads one signal of the raw or the processed draft law; subclasses are dataclasses with the field ``law``."""

    law: str
    base: ClassVar[str]
    """The signal on the raw law."""

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if self.law not in ENDINGS:
            raise UserError(f"law={self.law} is unknown: give raw or processed")

    @property
    def signal(self) -> str:
        """The signal on the law that is asked for."""
        return self.base + ENDINGS[self.law]

    @property
    def needs(self) -> frozenset[str]:
        """The signal."""
        return frozenset({self.signal})


@STOP.rule("confidence")
@dataclass(frozen=True, slots=True)
class Confidence(LawRule):
    """Stops when q(x) < c (transformers' ``assistant_confidence_threshold``). It reads x, so x is kept and checked.

    Args:
        c: threshold, probability.
        law: the raw law, or the processed law that x was drawn from (no use at temperature 0, where q(x) is 1).
    """

    c: float = number(0.4, 0.0, 1.0)
    law: str = "raw"
    base: ClassVar[str] = "token_prob"
    sees_token: ClassVar[bool] = True  # q(x) depends on x

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide q(x) < c."""
        return signals[self.signal] < self.c, state


@STOP.rule("fallback")
@dataclass(frozen=True, slots=True)
class BildFallback(LawRule):
    """Stops when max q < f and discards the token (Big Little Decoder, Kim et al. 2023, fallback policy).

    Args:
        f: threshold, probability.
        law: "raw" or "processed".
    """

    f: float = number(0.6, 0.0, 1.0)
    law: str = "raw"
    base: ClassVar[str] = "max_prob"
    discards: ClassVar[bool] = True

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide max q < f."""
        return signals[self.signal] < self.f, state


@STOP.rule("svip")
@dataclass(frozen=True, slots=True)
class Svip(LawRule):
    """Stops when sqrt(c·H(q)) > h (SVIP, Zhang et al. 2024, equation 6): 1 − sqrt(cH) bounds the acceptance from below.

    Args:
        h: threshold. c: the constant that the paper absorbs into its reported h.
        law: "raw" or "processed".
    """

    h: float = number(0.3, 0.0, 1e6)
    c: float = number(0.15, 0.0, 1e6)
    law: str = "raw"
    base: ClassVar[str] = "entropy"

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide sqrt(c·H) > h."""
        return (self.c * signals[self.signal]).sqrt() > self.h, state


@STOP.rule("adaedl")
@dataclass(frozen=True, slots=True)
class AdaEdl(LawRule):
    """Stops when 1 − sqrt(g·H(q)) < λ; λ adapts to the acceptance rate (AdaEDL, Agrawal et al. 2024).

    After a round: AR ← β1·AR + (1 − β1)·accepted/drafted; λ' = λ + ε if AR < α, else λ − ε unless all of ``longest``
    tokens were accepted; λ ← β2·λ + (1 − β2)·λ'.

    Args:
        g: scale of the entropy. alpha: target acceptance rate. beta1, beta2: decay rates of AR and λ.
        epsilon: step of λ. threshold: λ at the start. longest: γ_max, tokens.
        law: "raw" or "processed".
    """

    g: float = number(0.2, 0.0, 1e6)
    alpha: float = number(0.9, 0.0, 1.0)
    beta1: float = number(0.5, 0.0, 1.0)
    beta2: float = number(0.9, 0.0, 1.0)
    epsilon: float = number(0.01, 0.0, 1.0)
    threshold: float = number(0.5, 0.0, 1.0)
    longest: int = count(40)
    law: str = "raw"
    base: ClassVar[str] = "entropy"

    def start(self) -> State:
        """(λ, AR) in float64; AR starts at α."""
        return (
            torch.tensor(self.threshold, dtype=torch.float64),
            torch.tensor(self.alpha, dtype=torch.float64),
        )

    def possible(self, state: State) -> bool:
        """Whether AR is in [0, 1]; λ is unbounded."""
        return 0 <= float(state[1]) <= 1

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide 1 − sqrt(g·H) < λ, or ``longest`` tokens."""
        low = 1 - (self.g * signals[self.signal]).sqrt() < state[0]
        return low | (signals["drafted"] >= self.longest), state

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """Update AR and λ from the checked tokens; without any, the state stays the same."""
        if checked == 0:
            return state
        threshold, rate = state
        rate = self.beta1 * rate + (1 - self.beta1) * accepted / checked
        full = accepted == self.longest
        wanted = torch.where(
            rate < self.alpha, threshold + self.epsilon, threshold if full else threshold - self.epsilon
        )
        return (self.beta2 * threshold + (1 - self.beta2) * wanted, rate)
