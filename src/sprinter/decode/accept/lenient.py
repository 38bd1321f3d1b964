"""Lenient acceptance: exact against a mixture of target and draft (transformers' assistant_ensemble_weight)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual

__all__ = ["Lenient"]


@ACCEPT.rule("lenient")
@dataclass(frozen=True, slots=True)
class Lenient(AcceptRule):
    """Exact acceptance against m = w·p + (1 − w)·q: π = m, so TV(π, p) = (1 − w)·TV(p, q).

    Args:
        w: weight of the target in the mixture.
    """

    w: float = number(0.8, 0.0, 1.0)

    @property
    def lossless(self) -> bool:
        """Whether w = 1: the mixture is then p."""
        return self.w == 1

    def _mixture(self, p: Tensor, q: Tensor) -> Tensor:
        return self.w * p + (1 - self.w) * q

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, m/q)."""
        return chances(self._mixture(p, q), q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [m − q]₊, normalised, which is equal to [p − q]₊, normalised."""
        return residual(p, q)
