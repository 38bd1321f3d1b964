"""Closed forms that only checks need: SPRINTER and lossy rules on chains, and what a batch saves at one position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule
from sprinter.laws import kl_divergence, residual, tv_distance
from sprinter.theory.chains import MarkovChain, positions
from sprinter.theory.front import batch_laws
from sprinter.theory.numbers import chance


class SequentialCounts(NamedTuple):
    """Expected counts of one text: target calls, sum of drifts, bonus tokens."""

    target_calls: float
    drift: float
    bonus: float


def sequential_counts(chain: MarkovChain, eta_tp: float, eta_fp: float) -> SequentialCounts:
    """Exact counts of SPRINTER with the gate of its theorems, without a cap, on a chain.

    By Theorem 3.1 every *drafted* position has the law p_S; a bonus token has the law p. So the mean drift is
    η_FP·TV(p, q) over the drafted positions, and smaller over all positions.
    """
    better = chain.q <= chain.p
    trust = torch.where(better, float(chance("eta_tp", eta_tp)), float(chance("eta_fp", eta_fp)))
    trusted = chain.q * trust
    kept = torch.minimum(chain.p, chain.q) * (1 - trust)
    replaced = (1 - (trusted + kept).sum(-1, keepdim=True)) * residual(chain.p, chain.q)
    tv = tv_distance(chain.p, chain.q)
    drafted, bonus = chain.start, torch.zeros_like(chain.start)
    calls = drift = given = 0.0
    for n in range(chain.horizon):
        drift += eta_fp * float((drafted * tv[n]).sum())
        calls += float(drafted @ (1 - trusted[n].sum(-1)))
        given += float(bonus.sum())
        after = drafted @ (trusted[n] + replaced[n]) + bonus @ chain.p[n]
        drafted, bonus = after, drafted @ kept[n]
    return SequentialCounts(calls, drift, given)


class RuleOnChain(NamedTuple):
    """Effect of an accept rule on a chain if every token is drafted.

    Attributes:
        rejections: expected number per text.
        drift: expected sum of TV(π, p) under the method's own text, which bounds the TV between texts.
        kl, kl_reversed: KL(target‖method) and KL(method‖target) of whole texts.
        kept, kept_by_target: expected share of positions where the rule keeps every token, in the method's own and in
            the target's text.
    """

    rejections: float
    drift: float
    kl: float
    kl_reversed: float
    kept: float
    kept_by_target: float


def rule_on_chain(chain: MarkovChain, rule: AcceptRule) -> RuleOnChain:
    """Exact sums over texts that follow an accept rule's own law π."""
    b, law = rule.keep(chain.p, chain.q), rule.law(chain.p, chain.q)
    own, target = positions(chain.start, law), positions(chain.start, chain.p)
    reject = 1 - (chain.q * b).sum(-1)
    every = (b >= 1).all(-1).double()

    def mean(weights: Tensor, values: Tensor) -> float:
        return float(torch.where(weights > 0, weights * values, torch.zeros_like(values)).sum())

    return RuleOnChain(
        mean(own, reject),
        mean(own, tv_distance(law, chain.p)),
        mean(target, kl_divergence(chain.p, law)),
        mean(own, kl_divergence(law, chain.p)),
        mean(own, every) / chain.horizon,
        mean(target, every) / chain.horizon,
    )


def batch_improvement(p: Tensor, q: Tensor, drafts: int | None) -> Tensor:
    """Rejections that M drafts save at one position: TV(p, q) − Π_m TV(p^m, q), ``[...]``."""
    return tv_distance(p, q) - batch_laws(p, q, drafts)[0]
