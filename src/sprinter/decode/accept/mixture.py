"""Exact acceptance against a law between target and draft: lenient (transformers), DIVERSED, speculative cascades."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import choice, number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.errors import SprinterError
from sprinter.laws import residual, tv_distance

__all__ = ["DEFERRALS", "Cascade", "Diversed", "Lenient"]

DEFERRALS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "chow": lambda p, q, alpha: q.amax(-1) < 1 - alpha,
    "diff": lambda p, q, alpha: q.amax(-1) < p.amax(-1) - alpha,
    "opt": lambda p, q, alpha: q.amax(-1) < p.amax(-1) - alpha * tv_distance(p, q),
}
"""Whether a position is deferred to the target, by name."""


class MixtureRule(AcceptRule):
    """Exact acceptance against m = w p + (1 − w) q, whose weight w may depend on the position: π = m."""

    @abstractmethod
    def mixture(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        """m ``[..., V]``."""

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, m/q)."""
        return chances(self.mixture(p, q, control), q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [m − q]₊, normalised, which is equal to [p − q]₊, normalised."""
        return residual(p, q)


@ACCEPT.rule("lenient")
@dataclass(frozen=True, slots=True)
class Lenient(MixtureRule):
    """Exact acceptance against m = w·p + (1 − w)·q: π = m, so TV(π, p) = (1 − w)·TV(p, q).

    transformers has it as ``assistant_ensemble_weight``.

    Args:
        w: weight of the target in the mixture.
    """

    w: float = number(0.8, 0.0, 1.0)

    @property
    def lossless(self) -> bool:
        """Whether w = 1: the mixture is then p."""
        return self.w == 1

    def mixture(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        """The same weight everywhere."""
        return self.w * p + (1 - self.w) * q


@ACCEPT.rule("diversed")
@dataclass(frozen=True, slots=True)
class Diversed(MixtureRule):
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

    def mixture(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        """By the head's score."""
        if control is None or "diversed" not in control.heads:
            raise SprinterError(f"{self} was given no score of a head: give control.heads")
        w = (self.scale * control.heads["diversed"].to(p)).unsqueeze(-1)
        return w * q + (1 - w) * p


@ACCEPT.rule("cascade")
@dataclass(frozen=True, slots=True)
class Cascade(MixtureRule):
    """Exact acceptance against m = p where the position is deferred, else m = q (speculative cascades): π = m.

    The deferral is decided on the raw temperature-1 laws (Narasimhan et al. 2025).

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

    def mixture(self, p: Tensor, q: Tensor, control: Control | None) -> Tensor:
        """p where deferred, else q."""
        return torch.where(self._deferred(p, q, control), p, q)
