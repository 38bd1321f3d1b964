"""Trust rules that look at nothing: nobody, everyone, a coin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import number
from sprinter.decode.registry import TRUST
from sprinter.decode.trust.base import State, TrustRule

__all__ = ["Coin", "Everyone", "Nobody"]


@TRUST.rule("nobody")
@dataclass(frozen=True, slots=True)
class Nobody(TrustRule):
    """Trusts no token, as in standard speculative decoding."""

    never: ClassVar[bool] = True  # no token is ever trusted

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide False for every token."""
        return torch.tensor(False), state


@TRUST.rule("everyone")
@dataclass(frozen=True, slots=True)
class Everyone(TrustRule):
    """Trusts every token: the draft model alone."""

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide True for every token."""
        return torch.tensor(True), state


@TRUST.rule("coin")
@dataclass(frozen=True, slots=True)
class Coin(TrustRule):
    """Trusts with a fixed probability: the baseline for a gate.

    Args:
        rate: probability in [0, 1].
    """

    rate: float = number(0.5, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"uniform"})

    @property
    def never(self) -> bool:
        """Whether rate is 0."""
        return self.rate == 0

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide u < rate."""
        return signals["uniform"] < self.rate, state
