"""Fuzzy acceptance: keep where the two laws are close (Fuzzy Speculative Decoding, Holsman et al. 2025)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule
from sprinter.decode.checks import choice, count, flag, number
from sprinter.decode.draft import Control, LawPair
from sprinter.decode.registry import ACCEPT
from sprinter.laws import js_divergence, kl_divergence, one_hot, tv_distance

__all__ = ["DIVERGENCES", "Fuzzy"]


def _js_reference(p: Tensor, q: Tensor) -> Tensor:
    """½KL(M‖p) + ½KL(M‖q), unbounded: the published code computes it, and the paper's thresholds are on its scale."""
    mean = (p + q) / 2
    return (kl_divergence(mean, p) + kl_divergence(mean, q)) / 2


DIVERGENCES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "js": js_divergence,
    "kl": kl_divergence,
    "kl_reversed": lambda p, q: kl_divergence(q, p),
    "tv": tv_distance,
    "js_reference": _js_reference,
}


@ACCEPT.rule("fuzzy")
@dataclass(frozen=True, slots=True)
class Fuzzy(AcceptRule):
    """b = 1 for the whole position if div(p, q) < threshold, else 0; r = p (FSD, section 4).

    The divergence is a control signal: it is taken on the raw temperature-1 laws. π is q below the threshold, p above.

    Args:
        divergence: js (at most ln 2), kl = KL(p‖q), kl_reversed = KL(q‖p), tv, js_reference (the paper's scale).
        threshold: T, nats (tv: probability).
        top_k: compare only the target's k likeliest tokens, and one bucket for the rest; 0: all tokens.
        greedy_replacement: replace a rejected token with argmax p instead of a draw from p (the paper's section 6.3).
    """

    divergence: str = choice("js_reference", "divergence", DIVERGENCES)
    threshold: float = number(0.3, 0.0, float("inf"))
    top_k: int = count(0, 0)
    greedy_replacement: bool = flag(False)
    needs_raw: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        """Whether the threshold is 0 and replacements are sampled."""
        return self.threshold == 0 and not self.greedy_replacement

    @property
    def lossless_greedy(self) -> bool:
        """Whether the threshold is 0."""
        return self.threshold == 0

    @property
    def needs_support(self) -> bool:
        """Whether the divergence is infinite there."""
        return self.top_k == 0 and self.divergence in ("js_reference", "kl")

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b, the same for all tokens of a position: 1 if div(p, q) < threshold, else 0."""
        laws = LawPair(p, q) if control is None else LawPair(control.p, control.q)
        if 0 < self.top_k < laws.p.shape[-1]:
            laws = _with_rest(laws, self.top_k)
        close = DIVERGENCES[self.divergence](*laws) < self.threshold
        return close.unsqueeze(-1).to(p.dtype).expand_as(p)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = p, or one-hot at argmax p if ``greedy_replacement``."""
        return one_hot(p) if self.greedy_replacement else p


def _with_rest(laws: LawPair, k: int) -> LawPair:
    """Both laws on the k likeliest tokens of p and one bucket for all others, ``[..., k + 1]``."""
    kept = laws.p.topk(k, -1).indices
    parts = (law.gather(-1, kept) for law in laws)
    return LawPair(*(torch.cat([part, (1 - part.sum(-1, keepdim=True)).clamp(min=0)], -1) for part in parts))
