"""Stop rules: end this draft run and call the target now? Asked after each draft token.

A cap, the end of the text and the limits always stop; they are the loop's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.registry import STOP
from sprinter.decode.trust import State

__all__ = ["Fixed", "Never", "StopRule", "Untrusted"]


class StopRule(ABC):
    """A pure function (signals, state) -> (decision, state) on tensors.

    ``needs`` names signals as for trust rules; ``trusted`` (the trust rule's answer) and ``drafted`` (tokens drafted in
    this run, from 1) are always there. ``discards = True``: the token that triggers the stop is thrown away; such a
    rule must not look at it (``sees_token`` False), or exact methods would be biased.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    sees_token: ClassVar[bool] = False
    discards: ClassVar[bool] = False

    def start(self) -> State:
        """State at the start of a sequence."""
        return ()

    def begin_round(self, state: State) -> State:
        """State at the start of a draft run."""
        return state

    @abstractmethod
    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decision (bool tensor, shape of the signals) and the next state."""

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """State after the target call: ``drafted`` tokens in the run, ``checked`` of them untrusted, of which
        ``accepted`` were kept."""
        return state


@STOP.rule("fixed")
@dataclass(frozen=True, slots=True)
class Fixed(StopRule):
    """Stop after gamma tokens (Leviathan et al. 2023).

    Args:
        gamma: draft length, tokens.
    """

    gamma: int = 5

    def __post_init__(self) -> None:
        at_least("gamma", self.gamma, 1)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """drafted >= gamma."""
        return signals["drafted"] >= self.gamma, state


@STOP.rule("untrusted")
@dataclass(frozen=True, slots=True)
class Untrusted(StopRule):
    """Stop at the first token that the trust rule refused (SPRINTER, Algorithms 1 and 2)."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Not trusted."""
        return ~signals["trusted"], state


@STOP.rule("never")
@dataclass(frozen=True, slots=True)
class Never(StopRule):
    """Only the cap and the end of the text stop a run."""

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Always no."""
        return torch.zeros_like(signals["drafted"], dtype=torch.bool), state
