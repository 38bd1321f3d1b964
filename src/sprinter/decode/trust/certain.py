"""The trust rule without training: the draft's own certainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from torch import Tensor

from sprinter.decode.checks import Parameters, choice, ranged
from sprinter.decode.registry import TRUST
from sprinter.decode.threshold import DEFAULT, reaches
from sprinter.decode.trust.base import State, TrustRule
from sprinter.errors import UserError

__all__ = ["CERTAINTY", "Certain"]


class _Certainty(NamedTuple):
    """How a signal is read: trust below or above the threshold, the threshold's largest value and its default."""

    below: bool
    most: float
    default: float


CERTAINTY: Mapping[str, _Certainty] = {
    "entropy": _Certainty(True, 1e6, 0.3),
    "max_prob": _Certainty(False, 1.0, 0.9),
    "margin": _Certainty(False, 1e6, 3.0),
}
"""The signals that ``certain`` reads."""


@TRUST.rule("certain")
@dataclass(frozen=True, slots=True)
class Certain(TrustRule):
    """Trusts x where the draft's raw law is certain: H(q) <= threshold, or max q or the margin >= threshold.

    It sees the prefix, not x, and needs no training. The signals are those of ``sprinter.decode.signals``, at
    temperature 1 and without truncation: a threshold means the same at each temperature.

    Args:
        signal: "entropy" (nats), "max_prob" (a probability) or "margin" (of the two largest logits, nats).
        threshold: in the signal's unit. "default": 0.3 nats of entropy, 0.9, or a margin of 3 nats.
    """

    signal: str = choice("entropy", "signal of certain", CERTAINTY)
    threshold: float | str = DEFAULT
    dial: ClassVar[str | None] = "threshold"

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if not isinstance(self.threshold, str):
            ranged(self, "threshold", 0.0, CERTAINTY[self.signal].most)
        elif self.threshold != DEFAULT:
            raise UserError(f"threshold={self.threshold} is not a number: give one, or '{DEFAULT}'")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """The signal, of the raw law."""
        return frozenset({self.signal})

    @property
    def limit(self) -> float:
        """The threshold as a number."""
        return CERTAINTY[self.signal].default if isinstance(self.threshold, str) else self.threshold

    @property
    def certainty(self) -> tuple[str, ...]:
        """The signal."""
        return (self.signal,)

    def settle(self, taus: Mapping[str, float]) -> Certain:
        """The rule with the number in place of "default"."""
        return replace(self, threshold=self.limit)

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """Decide by the threshold, see ``reaches``."""
        value = signals[self.signal]
        if CERTAINTY[self.signal].below:
            return reaches(-value, -self.limit), state
        return reaches(value, self.limit), state
