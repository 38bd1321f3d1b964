"""Trust rules decide, after each draft token, whether to keep it without a target check."""

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
"""Value of a threshold parameter: use the threshold that is recorded in the head."""
_UNRECORDED = 0.5
"""Value of "recorded" without a head, in simulations and enumeration."""


class TrustRule(ABC):
    """A pure function (signals, state) -> (decision, state) on tensors.

    ``needs`` names signals of ``sprinter.decode.signals``: signals of the draft's laws (``SIGNALS``, raw or with the
    suffix ``_processed``), scores of heads and ``uniform`` (``GIVEN``); ``drafted`` is always given. Set
    ``sees_token = True`` if the decision depends on x beyond its prefix, for example through a signal that sees x:
    drift is then metered in its one-sample form (see ``decode.meter``).
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    sees_token: ClassVar[bool] = False

    @property
    def never(self) -> bool:
        """Whether the rule trusts no token, for all signals."""
        return False

    def start(self) -> State:
        """State at the start of a sequence."""
        return ()

    def possible(self, state: State) -> bool:
        """Whether the rule can reach this state (shapes and dtypes as in ``start``); checks states given by users."""
        return True

    def settle(self, taus: Mapping[str, float]) -> TrustRule:
        """The rule with the heads' thresholds in place of "recorded".

        Args:
            taus: by kind of head, the threshold that it records.
        """
        return self

    @abstractmethod
    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decision (bool tensor, shape of the signals) and the next state."""


@TRUST.rule("nobody")
@dataclass(frozen=True, slots=True)
class Nobody(TrustRule):
    """Trusts no token, as in standard speculative decoding."""

    @property
    def never(self) -> bool:
        """True: no token is ever trusted."""
        return True

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


@TRUST.rule("gate")
@dataclass(frozen=True, slots=True)
class Gate(TrustRule):
    """Trusts x iff gate >= tau (SPRINTER, Algorithm 2; Algorithm 1 prints the opposite sign).

    The gate reads the draft's hidden state that produced q: it sees the prefix, not x.

    Args:
        tau: threshold in [0, 1]; higher values trust fewer tokens. "recorded": the threshold that was chosen when the
            gate was trained; 0.5 without a gate.
    """

    tau: float | str = RECORDED
    needs: ClassVar[frozenset[str]] = frozenset({"gate"})

    def __post_init__(self) -> None:
        if self.tau != RECORDED:
            ranged(self, "tau", 0.0, 1.0)

    def settle(self, taus: Mapping[str, float]) -> Gate:
        """The rule with the gate's own τ in place of "recorded"."""
        return replace(self, tau=taus["gate"]) if isinstance(self.tau, str) and "gate" in taus else self

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide gate >= tau, see ``reaches``."""
        return reaches(signals["gate"], _UNRECORDED if isinstance(self.tau, str) else self.tau), state


@TRUST.rule("coin")
@dataclass(frozen=True, slots=True)
class Coin(TrustRule):
    """Trusts with a fixed probability: the baseline for a gate.

    Args:
        rate: probability in [0, 1].
    """

    rate: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"uniform"})

    def __post_init__(self) -> None:
        ranged(self, "rate", 0.0, 1.0)

    @property
    def never(self) -> bool:
        """Whether rate is 0."""
        return self.rate == 0

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide u < rate."""
        return signals["uniform"] < self.rate, state
