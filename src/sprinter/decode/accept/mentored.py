"""Mentored decoding: the highest acceptance rate within a budget of KL(p‖π) (Tran-Thien 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual, wide

__all__ = ["Mentored"]

_LEAST = 1e-9  # smallest rejection probability that float64 resolves
_PARTS, _ROUNDS = 64, 10  # a bracket shrinks to 2^-60 of its length; a tiny α needs the relative precision


@ACCEPT.rule("mentored")
@dataclass(frozen=True, slots=True)
class Mentored(AcceptRule):
    """Maximises Σ q·b subject to KL(p‖π) <= D (Tran-Thien 2024, "An optimal lossy variant of speculative decoding").

    b = min(p/(αq), 1) and r = [p/λ − q]₊/(1 − R), R = Σ q·b, λ such that r is a law; then p/π = clip(p/q, α, λ), and α
    is the smallest that keeps the budget. If p has zeros, KL may stay below the budget even as α → 0; then b = 1 where
    p > 0 and b = c where p = 0, with the largest c that keeps the budget. If KL(p‖q) <= D, every token is kept.

    The author's notebook stops its search at 20 % of D and is off by one index in λ; here both are solved to rounding
    precision.

    Args:
        kl: the budget D, nats per position.
    """

    kl: float = number(0.1, 0.0, float("inf"))

    @property
    def lossless(self) -> bool:
        """Whether D = 0."""
        return self.kl == 0

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(p/(αq), 1), and the special cases in the class docstring."""
        if self.lossless:  # KL is flat at α = 1, so a search would stop before it
            return chances(p, q)
        return self.both(p, q)[0]

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [p/λ − q]₊, normalised; p if no token is ever rejected."""
        return residual(p, q) if self.lossless else self.both(p, q)[1]

    def both(self, p: Tensor, q: Tensor, control: Control | None = None) -> tuple[Tensor, Tensor]:
        """(b, r) from one search."""
        if self.lossless:
            return chances(p, q), residual(p, q)
        exact_p, exact_q = wide(p), wide(q)
        b, slope = self._solve(exact_p, exact_q)
        excess = (exact_p * slope - exact_q).clamp(min=0)
        total = excess.sum(-1, keepdim=True)
        r = torch.where(total > 0, excess / total, exact_p)
        return b.to(p), r.to(p)

    def _solve(self, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        """b ``[..., V]`` and μ = 1/λ ``[..., 1]``, for laws in float64."""
        sums = _Sums.of(p, q)
        zero, one = torch.zeros_like(sums.kl_all), torch.ones_like(sums.kl_all)
        slack = sums.kl(sums.refused_at_zero(zero), zero) <= self.kl  # [..., 1]
        everything = sums.kl_all <= self.kl
        alpha, share = one, zero
        if not bool((slack | everything).all()):
            alpha = _edge(lambda tried: sums.kl(sums.refused(tried), tried) <= self.kl, one, zero)
        if bool((slack & ~everything).any()):
            share = _edge(lambda tried: sums.kl(sums.refused_at_zero(tried), zero) <= self.kl, zero, one)
        share = torch.where(everything, one, share)
        b_alpha = torch.where(q > 0, p / (alpha * q), 1.0).clamp(max=1)
        b_slack = torch.where(p > 0, 1.0, share).to(torch.float64)
        open_ended = slack | everything
        b = torch.where(open_ended, b_slack, b_alpha)
        refused = torch.where(open_ended, sums.refused_at_zero(share), sums.refused(alpha))
        return b, sums.slope(refused)


class _Sums(NamedTuple):
    """Cumulative sums over the tokens in order of p/q: each trial of α costs a binary search, not a sum over V.

    α, c and the rejection probability have shape ``[..., K]``: K trials per position at once.
    """

    ratio: Tensor  # [..., V] p/q ascending; inf where q = 0
    p: Tensor  # [..., V + 1] mass of p before entry i
    q: Tensor
    plogr: Tensor  # Σ p ln(p/q) before entry i, 0 where q = 0
    rise: Tensor  # [..., V] Σ_{i >= j} (q_i − p_i / ratio_j), increasing in j
    kl_all: Tensor  # [..., 1] KL(p‖q)
    outside: Tensor  # [..., 1] mass of q where p = 0

    @staticmethod
    def of(p: Tensor, q: Tensor) -> _Sums:
        ratio = torch.where(q > 0, p / q, torch.where(p > 0, torch.inf, 1.0).double())
        ratio, order = ratio.sort(-1)
        p, q = p.gather(-1, order), q.gather(-1, order)
        terms = torch.where((p > 0) & (q > 0), p * ratio.log(), 0.0)
        sum_p, sum_q, sum_k = (_before(values) for values in (p, q, terms))
        tail_p, tail_q = sum_p[..., -1:] - sum_p[..., :-1], sum_q[..., -1:] - sum_q[..., :-1]
        gap = torch.where(ratio > 0, tail_p / ratio.clamp(min=1e-300), torch.inf) - tail_q
        kl_all = torch.where(((p > 0) & (q == 0)).any(-1, keepdim=True), torch.inf, sum_k[..., -1:])
        return _Sums(
            ratio, sum_p, sum_q, sum_k, -gap, kl_all, torch.where(p == 0, q, 0.0).sum(-1, keepdim=True)
        )

    def refused(self, alpha: Tensor) -> Tensor:
        """The rejection probability 1 − R = Σ [q − p/α]₊."""
        i = torch.searchsorted(self.ratio, alpha)
        return (self.q.gather(-1, i) - self.p.gather(-1, i) / alpha).clamp(min=0)

    def refused_at_zero(self, share: Tensor) -> Tensor:
        """The rejection probability 1 − R for b = 1 where p > 0 and b = share where p = 0."""
        return (1 - share) * self.outside

    def slope(self, refused: Tensor) -> Tensor:
        """μ = 1/λ with Σ [μp − q]₊ = 1 − R."""
        j = self._first(refused)
        return self._slope_at(j, refused)

    def _slope_at(self, j: Tensor, refused: Tensor) -> Tensor:
        tail_p, tail_q = self.p[..., -1:] - self.p.gather(-1, j), self.q[..., -1:] - self.q.gather(-1, j)
        return (refused + tail_q) / tail_p.clamp(min=1e-300)

    def _first(self, refused: Tensor) -> Tensor:
        """The first entry with p/q > λ: the first with −rise below the rejection probability."""
        return torch.searchsorted(self.rise, -refused, right=True).clamp(max=self.ratio.shape[-1] - 1)

    def kl(self, refused: Tensor, alpha: Tensor) -> Tensor:
        """KL(p‖π) = Σ p ln clip(p/q, α, λ)."""
        first = self._first(refused)
        i = torch.searchsorted(self.ratio, alpha)
        j = torch.maximum(first, i)
        low = self.p.gather(-1, i) * alpha.log().clamp(min=-1e300)
        middle = self.plogr.gather(-1, j) - self.plogr.gather(-1, i)
        slope = self._slope_at(first, refused).clamp(min=1e-300)
        high = -(self.p[..., -1:] - self.p.gather(-1, j)) * slope.log()
        # Where p > 0 and q = 0, π comes from rejections alone; 1 − Σ q·b cannot resolve a smaller probability.
        lost = self.kl_all.isinf() & (refused < _LEAST)
        return torch.where(lost, torch.inf, low + middle + high)


def _before(values: Tensor) -> Tensor:
    """Sum of the entries before each index, ``[..., V]`` -> ``[..., V + 1]``."""
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


def _edge(feasible: Callable[[Tensor], Tensor], good: Tensor, bad: Tensor) -> Tensor:
    """The feasible side of the boundary between a feasible and an infeasible value. All ``[..., 1]``."""
    places = torch.arange(1, _PARTS, device=good.device, dtype=torch.float64) / _PARTS
    for _ in range(_ROUNDS):
        inside = good + (bad - good) * places
        fine = feasible(inside).cumprod(-1).sum(-1, keepdim=True)
        tried = torch.cat([good, inside, bad], -1)
        good, bad = tried.gather(-1, fine), tried.gather(-1, fine + 1)
    return good
