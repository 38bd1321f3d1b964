"""The base class of stop rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from sprinter.decode.checks import Parameters
from sprinter.decode.trust import State

__all__ = ["StopRule"]


class StopRule(Parameters, ABC):
    """A pure function (signals, state) -> (decision, state) on tensors.

    ``needs`` names signals of ``sprinter.decode.signals``; ``trusted`` (the trust rule's answer), ``drafted``
    (tokens drafted in this run, from 1) and, but in trees, ``copied`` are always given. ``discards = True``: the token
    that triggers the stop is dropped; such a rule must not read it (``sees_token`` False), or exact methods would be
    biased.

    Of a rule that ``learns``, ``learn`` is given the overlaps β at each target call, as in a trust rule. In trees it
    is given a number for each level that was reached: 1 if one of its tokens was accepted, else 0; the signals are
    those at the tip of the best path, before the level. ``chains_only = True``: it cannot end trees.
    """

    discards: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Names of the signals that the rule reads."""
        return frozenset()

    @property
    def sees_token(self) -> bool:
        """Whether the decision depends on x beyond its prefix."""
        return False

    @property
    def learns(self) -> bool:
        """Whether the rule is given the overlaps β of draft tokens."""
        return False

    def start(self) -> State:
        """State at the start of a sequence."""
        return ()

    def possible(self, state: State) -> bool:
        """Whether the rule can reach this state (shapes and dtypes as in ``start``); checks states given by users."""
        return True

    def begin_round(self, state: State) -> State:
        """State at the start of a draft run."""
        return state

    def ahead(self, state: State) -> int | None:
        """Number of tokens that a run will have in any case, so that they are drafted in one go; None: not known."""
        return None

    @abstractmethod
    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decision (bool tensor, shape of the signals) and the next state."""

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor, state: State) -> State:
        """The state after a target call, before ``end_round``, if the rule ``learns``; as ``TrustRule.learn``."""
        return state

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        """State after the target call.

        Args:
            drafted: tokens in the run. checked: the untrusted ones of them. accepted: the kept ones of these.
        """
        return state
