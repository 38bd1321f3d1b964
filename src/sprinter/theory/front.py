"""Rejection against bias at one position (Yin et al. 2024, Theorems 2, 4 and 5), and the gain of several drafts.

A rule keeps a draft token x ~ q with probability b(x) and draws from r after a rejection. Laws and b are ``[..., V]``.
The paper's letters are exchanged: here p is the target's law and q the draft's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.decode.accept.base import chances
from sprinter.decode.checks import at_least
from sprinter.laws import residual, tv_distance
from sprinter.theory.numbers import Number, as_tensor, chance

__all__ = [
    "batch_laws", "bernoulli_improvement", "best_loss", "best_replacement", "excess",
    "rejection", "shortfall", "uniform_improvement",
]  # fmt: skip


def rejection(q: Tensor, b: Tensor) -> Tensor:
    """P(reject) = 1 − Σ q·b, ``[...]``."""
    return ((1 - b) * q).sum(-1)


def best_loss(p: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Theorem 4: Loss*_TV(b) = ½Σ|p − q·b| − ½Σ(1 − b)·q, the least TV(π, p) that any replacement law gives."""
    return tv_distance(p, q * b) - rejection(q, b) / 2


def best_replacement(p: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """A replacement law that attains ``best_loss``: [p − q·b]₊ normalised (p if nothing is left)."""
    return residual(p, q * b)


def excess(p: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Theorems 2 and 5: P(reject) + Loss*_TV(b) − TV(p, q); never negative, 0 on the Pareto front."""
    return rejection(q, b) + best_loss(p, q, b) - tv_distance(p, q)


def shortfall(p: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Σ q·[min(1, p/q) − b]₊, by how much a rule keeps less than exact acceptance.

    It equals ``excess`` for every b: a rule is on the front if and only if b >= min(1, p/q) wherever q > 0.
    """
    return (q * (chances(p, q) - b).clamp(min=0)).sum(-1)


# --- batches of drafts (Theorem 3 at one position) -------------------------------------------------------------------
def batch_laws(p: Tensor, q: Tensor, drafts: int | None) -> tuple[Tensor, Tensor]:
    """(Π_m TV(p^m, q), p^{M+1}), ``[...]`` and ``[..., V]``, with p^1 = p and p^{m+1} = [p^m − q]₊ normalised.

    The first is the probability that all M first tokens are rejected, the second the law of their replacement. M = None
    is the limit M → ∞: tokens that the draft never draws, Σ p over q = 0, are still missed (the paper assumes none).

    Raises:
        UserError: ``drafts`` is below 1.
    """
    if drafts is None:
        never = p * (q <= 0)
        total = never.sum(-1, keepdim=True)
        return total.squeeze(-1), torch.where(total > 0, never / total, p)
    at_least("drafts", drafts, 1)
    refused = torch.ones_like(p[..., 0])
    for _ in range(drafts):
        refused, p = refused * tv_distance(p, q), residual(p, q)
    return refused, p


def bernoulli_improvement(draft: Number, target: Number, drafts: Number) -> Tensor:
    """Rejections that M drafts save at one position, TV(p, q) − Π_m TV(p^m, q), for q = Ber(u), p = Ber(v).

    It is |u − v|·(1 − u^(M−1)) for u >= v, else |u − v|·(1 − (1 − u)^(M−1)).
    """
    u, v, m = chance("draft", draft), chance("target", target), as_tensor(drafts)
    return (u - v).abs() * (1 - torch.where(u >= v, u, 1 - u) ** (m - 1))


def uniform_improvement(ratio: Number, drafts: Number) -> Tensor:
    """The same for q uniform on V tokens and p uniform on V/r of them: (1 − 1/r) − (1 − 1/r)^M."""
    missed = 1 - 1 / as_tensor(ratio)
    return missed - missed ** as_tensor(drafts)
