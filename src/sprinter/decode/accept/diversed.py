"""DIVERSED: exact acceptance against a mixture of target and draft whose weight a head sets by context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.errors import SprinterError
from sprinter.laws import residual

__all__ = ["Diversed"]


@ACCEPT.rule("diversed")
@dataclass(frozen=True, slots=True)
class Diversed(AcceptRule):
    """Exact acceptance against m = w q + (1 − w) p (DIVERSED, arXiv 2604.07622): π = m, so TV(π, p) = w TV(p, q).

    w = scale · s, with s in [0, 1] the score of a head (kind ``diversed``) on the target's state after the prefix.

    Args:
        scale: largest weight of the draft; 0 is exact acceptance.
    """

    scale: float = number(1.0, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"diversed"})

    @property
    def lossless(self) -> bool:
        """Whether the scale is 0: the mixture is then p."""
        return self.scale == 0

    def _mixture(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        if control is None or "diversed" not in control.heads:
            raise SprinterError(f"{self} was given no score of a head: give control.heads")
        w = (self.scale * control.heads["diversed"].to(p)).unsqueeze(-1)
        return w * q + (1 - w) * p

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, m/q)."""
        return chances(self._mixture(p, q, control), q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [m − q]₊, normalised, which is [p − q]₊, normalised."""
        return residual(p, q)
