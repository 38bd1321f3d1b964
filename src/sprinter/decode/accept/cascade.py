"""Speculative cascades: the draft's law where it is good enough, the target's elsewhere (Narasimhan et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import choice, number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual, tv_distance

__all__ = ["DEFERRALS", "Cascade"]

DEFERRALS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "chow": lambda p, q, alpha: q.amax(-1) < 1 - alpha,
    "diff": lambda p, q, alpha: q.amax(-1) < p.amax(-1) - alpha,
    "opt": lambda p, q, alpha: q.amax(-1) < p.amax(-1) - alpha * tv_distance(p, q),
}
"""Whether a position is deferred to the target, by name."""


@ACCEPT.rule("cascade")
@dataclass(frozen=True, slots=True)
class Cascade(AcceptRule):
    """Exact acceptance against m = p where the position is deferred, else m = q (speculative cascades): π = m.

    The deferral is decided on the raw temperature-1 laws.

    Args:
        deferral: "chow": max q < 1 - alpha; "diff": max q < max p - alpha; "opt": max q < max p - alpha TV(p, q).
        alpha: the dial: a larger one defers less.
    """

    deferral: str = choice("opt", "deferral", DEFERRALS)
    alpha: float = number(0.5, 0.0, 1.0)
    needs_raw: ClassVar[bool] = True

    def _deferred(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        laws = Control(p, q) if control is None else control
        return DEFERRALS[self.deferral](laws.p, laws.q, self.alpha).unsqueeze(-1)

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, p/q) where deferred, else 1."""
        return torch.where(self._deferred(p, q, control), chances(p, q), torch.ones_like(p))

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [p - q]_+, normalised."""
        return residual(p, q)
