"""Trust rules: may this draft token be kept without asking the target? Asked after each draft token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.checks import ranged
from sprinter.decode.registry import TRUST
from sprinter.decode.threshold import reaches

__all__ = ["RECORDED", "Coin", "Everyone", "Gate", "Nobody", "State", "TrustRule"]

State = tuple[Tensor, ...]

RECORDED = "recorded"
"""In place of a threshold: the one that the head's maker chose and recorded in it."""
_UNRECORDED = 0.5
"""The threshold where no head is there to have recorded one: chains and laws without models."""


class TrustRule(ABC):
    """A pure function (signals, state) -> (decision, state) on tensors.

    ``needs`` names the signals, any of the tables in ``sprinter.decode.signals``: of the draft's laws (``SIGNALS``, raw
    or with the ending ``_processed``), scores of heads and ``uniform`` (``GIVEN``); ``drafted`` is always there. Set
    ``sees_token = True`` if the decision depends on x beyond its prefix, as it does where a signal sees x: drift is
    then metered with one sample (see ``decode.meter``).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    sees_token: ClassVar[bool] = False

    @property
    def never(self) -> bool:
        """Whether the answer is no whatever the signals say."""
        return False

    def start(self) -> State:
        """State at the start of a sequence."""
        return ()

    def possible(self, state: State) -> bool:
        """Whether the rule may be in this state, of shapes and dtypes as ``start`` has: asked where one is read."""
        return True

    def settle(self, taus: Mapping[str, float]) -> TrustRule:
        """The rule with the thresholds that it leaves to a head filled in.

        Args:
            taus: by kind of head, what each records.
        """
        return self

    @abstractmethod
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decision (bool tensor, shape of the signals) and the next state."""


@TRUST.rule("nobody")
@dataclass(frozen=True, slots=True)
class Nobody(TrustRule):
    """No token is trusted: every classic method."""

    @property
    def never(self) -> bool:
        """Always."""
        return True

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Always no."""
        return torch.tensor(False), state


@TRUST.rule("everyone")
@dataclass(frozen=True, slots=True)
class Everyone(TrustRule):
    """Every token is trusted: the draft model alone."""

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Always yes."""
        return torch.tensor(True), state


@TRUST.rule("gate")
@dataclass(frozen=True, slots=True)
class Gate(TrustRule):
    """Trust x iff gate >= tau (SPRINTER, Algorithm 2; Algorithm 1 prints the sign the other way round).

    The gate reads the draft's hidden state that produced q: it sees the prefix, not x.

    Args:
        tau: threshold in [0, 1]; more means fewer tokens trusted. Above every score: never trust. "recorded": the one
            that was chosen for the pair's gate when it was trained; 0.5 where there is no gate to ask.
    """

    tau: float | str = RECORDED
    needs: ClassVar[frozenset[str]] = frozenset({"gate"})

    def __post_init__(self) -> None:
        if self.tau != RECORDED:
            ranged(self, "tau", 0.0, 1.0)

    def settle(self, taus: Mapping[str, float]) -> Gate:
        """With the gate's own τ where none was given."""
        return replace(self, tau=taus["gate"]) if isinstance(self.tau, str) and "gate" in taus else self

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """gate >= tau."""
        return reaches(signals["gate"], _UNRECORDED if isinstance(self.tau, str) else self.tau), state


@TRUST.rule("coin")
@dataclass(frozen=True, slots=True)
class Coin(TrustRule):
    """Trust with a fixed chance: the baseline that a gate must beat.

    Args:
        rate: chance in [0, 1].
    """

    rate: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"uniform"})

    def __post_init__(self) -> None:
        ranged(self, "rate", 0.0, 1.0)

    @property
    def never(self) -> bool:
        """At rate 0."""
        return self.rate == 0

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """u < rate."""
        return signals["uniform"] < self.rate, state
