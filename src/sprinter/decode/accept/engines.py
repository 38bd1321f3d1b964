"""Lossy acceptance as inference engines offer it: TensorRT-LLM's relaxed acceptance, SGLang's thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import BLIND, AcceptRule
from sprinter.decode.checks import count, flag, number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings
from sprinter.laws import one_hot

__all__ = ["Relaxed", "Threshold"]


@ACCEPT.rule("relaxed")
@dataclass(frozen=True, slots=True)
class Relaxed(AcceptRule):
    """b = 1 iff x is among the target's k likeliest tokens and p(x) >= max p - delta; r = argmax p (TensorRT-LLM).

    The condition is read off the raw temperature-1 law, as there (``relaxed_topk``, ``relaxed_delta``).

    Args:
        top_k: number of tokens that may stay.
        delta: largest distance from the most probable token, in probability.
        sampled: draw replacements from p instead of taking argmax p.
    """

    top_k: int = count(10)
    delta: float = number(0.6, 0.0, 1.0)
    sampled: bool = flag(False)
    needs_raw: ClassVar[bool] = True
    siblings: ClassVar[frozenset[Siblings]] = BLIND

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = 1 for the likely tokens, else 0."""
        raw = p if control is None else control.p
        likely = raw.topk(min(self.top_k, raw.shape[-1]), -1)
        near = (likely.values >= likely.values[..., :1] - self.delta).to(p.dtype)
        return torch.zeros_like(p).scatter_(-1, likely.indices, near)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r, one-hot at argmax p; p if ``sampled``."""
        return p if self.sampled else one_hot(p)


@ACCEPT.rule("threshold")
@dataclass(frozen=True, slots=True)
class Threshold(AcceptRule):
    """b = 1 if p(x) >= single, else min(1, p(x)/total); the replacement is never the refused token (SGLang).

    SGLang's ``speculative_accept_threshold_single`` and ``_acc``. A refused x is replaced by a draw from p without x; r
    is the mean of these laws over the refused tokens, which gives texts the same law.

    Args:
        single: probability above which a token stays.
        total: divides the other probabilities; at 1 and ``single`` = 1 the rule is lossless for every q.
    """

    single: float = number(1.0, 0.0, 1.0)
    total: float = number(1.0, 1e-6, 1.0)

    @property
    def lossless(self) -> bool:
        """Whether both are 1."""
        return self.single == 1 and self.total == 1

    @property
    def lossless_greedy(self) -> bool:
        """Whether a token that the target would not write is refused: p(x) is 1 or 0."""
        return self.single > 0

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b, which does not read q."""
        return torch.where(p >= self.single, 1.0, (p / self.total).clamp(max=1))

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r(y), proportional to the sum over x other than y of q(x) (1 - b(x)) p(y) / (1 - p(x))."""
        refused = q * (1 - self.keep(p, q))
        shares = torch.where(refused > 0, refused / (1 - p), 0.0)
        law = p * (shares.sum(-1, keepdim=True) - shares).clamp(min=0)
        total = law.sum(-1, keepdim=True)
        return torch.where(total > 0, law / total, p)
