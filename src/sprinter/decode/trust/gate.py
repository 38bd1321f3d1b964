"""The trust rule of SPRINTER: a trained gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from sprinter.decode.checks import number
from sprinter.decode.registry import TRUST
from sprinter.decode.threshold import RECORDED, UNRECORDED, reaches
from sprinter.decode.trust.base import State, TrustRule

__all__ = ["Gate"]


@TRUST.rule("gate")
@dataclass(frozen=True, slots=True)
class Gate(TrustRule):
    """Trusts x iff gate >= tau (SPRINTER, Algorithm 2; Algorithm 1 prints the opposite sign).

    The gate reads the draft's hidden state that produced q: it sees the prefix, not x.

    Args:
        tau: threshold in [0, 1]; higher values trust fewer tokens. "recorded": the threshold that was chosen when the
            gate was trained; 0.5 without a gate.
    """

    tau: float | str = number(RECORDED, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"gate"})
    dial: ClassVar[str | None] = "tau"

    @property
    def certainty(self) -> tuple[str, ...]:
        """The gate's score."""
        return ("gate",)

    def settle(self, taus: Mapping[str, float]) -> Gate:
        """The rule with the gate's own τ in place of "recorded"."""
        return replace(self, tau=taus["gate"]) if isinstance(self.tau, str) and "gate" in taus else self

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide gate >= tau, see ``reaches``."""
        return reaches(signals["gate"], UNRECORDED if isinstance(self.tau, str) else self.tau), state
