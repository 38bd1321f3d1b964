"""Accept rules that do not read q: random acceptance, greedy match, typical acceptance, MARS, BiLD's rollback."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import BLIND, AcceptRule
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings
from sprinter.laws import entropy, one_hot

__all__ = ["Bild", "GreedyMatch", "Margin", "RandomAccept", "Typical"]


@ACCEPT.rule("random")
@dataclass(frozen=True, slots=True)
class RandomAccept(AcceptRule):
    """b = rate, r = p (FSD, Appendix E): π = rate·q + (1 − rate)·p.

    Args:
        rate: probability of keeping a token, in [0, 1].
    """

    rate: float = number(0.5, 0.0, 1.0)

    @property
    def lossless(self) -> bool:
        """Whether rate is 0: every token is then drawn from p."""
        return self.rate == 0

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = rate."""
        return torch.full_like(p, self.rate)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = p."""
        return p


@ACCEPT.rule("greedy")
@dataclass(frozen=True, slots=True)
class GreedyMatch(AcceptRule):
    """Keeps x iff it is argmax p, else replaces it with argmax p (greedy speculative decoding): π is one-hot."""

    siblings: ClassVar[frozenset[Siblings]] = BLIND
    lossless_greedy: ClassVar[bool] = True  # at temperature 0, p is one-hot at its argmax

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = 1 at argmax p, else 0."""
        return one_hot(p)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, one-hot at argmax p."""
        return one_hot(p)


@ACCEPT.rule("typical")
@dataclass(frozen=True, slots=True)
class Typical(AcceptRule):
    """b = 1 iff p(x) > min(ε, δ·exp(−H(p))), r = p (Medusa, Cai et al. 2024, typical acceptance).

    Args:
        epsilon: hard threshold, in probability.
        delta: entropy-dependent threshold.
    """

    epsilon: float = number(0.09, 0.0, 1.0)
    delta: float = number(0.3, 0.0, 1.0)
    siblings: ClassVar[frozenset[Siblings]] = BLIND

    @property
    def lossless_greedy(self) -> bool:
        """Whether the threshold is below 1: at temperature 0, p(x) is 1 or 0."""
        return min(self.epsilon, self.delta) < 1

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = 1 where p exceeds the threshold, else 0."""
        threshold = (self.delta * torch.exp(-entropy(p))).clamp(max=self.epsilon)
        return (p > threshold.unsqueeze(-1)).to(p.dtype)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = p."""
        return p


@ACCEPT.rule("margin")
@dataclass(frozen=True, slots=True)
class Margin(AcceptRule):
    """b = 1 iff x is the target's argmax, or its runner-up and z2/z1 >= theta; r = argmax p (MARS, arXiv 2601.15498).

    z1 and z2 are the target's two largest logits. A law determines their difference, not their ratio: the rule takes
    ``logit`` for z1, so that the runner-up stays iff ln p1 - ln p2 <= (1 - theta) logit, p at temperature 1.

    Args:
        theta: least ratio of the two largest logits, in [0, 1].
        logit: the target's largest logit at a typical position, nats.
    """

    theta: float = number(0.9, 0.0, 1.0)
    logit: float = number(20.0, 0.0, 1000.0)
    needs_raw: ClassVar[bool] = True
    siblings: ClassVar[frozenset[Siblings]] = BLIND

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = 1 at the most probable token, and at the second if it is near; else 0."""
        raw = p if control is None else control.p
        largest = raw.topk(min(2, raw.shape[-1]), -1)
        ratio = largest.values / largest.values[..., :1]
        near = (ratio >= math.exp((self.theta - 1) * self.logit)).to(p.dtype)
        return torch.zeros_like(p).scatter_(-1, largest.indices, near)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, one-hot at argmax p."""
        return one_hot(p)


@ACCEPT.rule("bild")
@dataclass(frozen=True, slots=True)
class Bild(AcceptRule):
    """b = 1 iff −ln p(x) <= rollback on the raw p, r = argmax p (Big Little Decoder, Kim et al. 2023, rollback policy).

    Args:
        rollback: threshold in nats.
    """

    rollback: float = number(5.0, 0.0, 1000.0)
    needs_raw: ClassVar[bool] = True
    siblings: ClassVar[frozenset[Siblings]] = BLIND

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = 1 where the raw p is at least exp(−rollback), else 0."""
        raw = p if control is None else control.p
        return (raw >= math.exp(-self.rollback)).to(p.dtype)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, one-hot at argmax p."""
        return one_hot(p)
