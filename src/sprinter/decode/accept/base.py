"""What an accept rule is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.draft import LawPair
from sprinter.laws import tv_distance

__all__ = ["AcceptRule", "Judge", "chances", "emitted"]


class Judge(ABC):  # noqa: B024 (what to implement differs between rules for one draft and for several)
    """What every accept rule says of itself."""

    needs_raw: ClassVar[bool] = False

    @property
    def lossless(self) -> bool:
        """Whether π = p for all p and q."""
        return False

    @property
    def lossless_greedy(self) -> bool:
        """Whether π = p whenever p and q are one-hot (temperature 0)."""
        return self.lossless


class AcceptRule(Judge):
    """Keep x with chance b(x), else draw from r: π(x) = q(x)·b(x) + (1 − Σ q·b)·r(x).

    All laws are ``[..., V]``. ``control`` holds the raw temperature-1 laws for rules that decide on them
    (``needs_raw = True``); None means p and q themselves.
    """

    @abstractmethod
    def keep(self, p: Tensor, q: Tensor, control: LawPair | None = None) -> Tensor:
        """b, the chance of keeping each token, in [0, 1]."""

    @abstractmethod
    def replacement(self, p: Tensor, q: Tensor, control: LawPair | None = None) -> Tensor:
        """r, the law of the replacement after a refusal."""

    def both(self, p: Tensor, q: Tensor, control: LawPair | None = None) -> tuple[Tensor, Tensor]:
        """(b, r); for rules that find the two together."""
        return self.keep(p, q, control), self.replacement(p, q, control)

    def law(self, p: Tensor, q: Tensor, control: LawPair | None = None) -> Tensor:
        """π, the law of the token that this rule emits."""
        return emitted(q, *self.both(p, q, control))

    def drift(self, p: Tensor, q: Tensor, control: LawPair | None = None) -> Tensor:
        """TV(π, p), ``[...]``; 0 by identity where the rule is lossless."""
        if self.lossless:
            return torch.zeros(p.shape[:-1], dtype=p.dtype)
        return tv_distance(self.law(p, q, control), p)


def emitted(q: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """π = q·b + (1 − Σ q·b)·r, ``[..., V]``."""
    kept = q * b
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp(min=0) * r


def chances(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q), 1 where q = 0. ``[..., V]``; p may be any non-negative weights."""
    return torch.where(q > 0, p / q, torch.ones_like(p)).clamp(max=1)
