"""Expected rejections on Markov chains (Yin et al. 2024, Theorems 1 and 3), also with finite drafts.

The paper's setting: position n of the text, n = 1 ... T, has laws p_n(· | x_{n−1}) and q_n(· | x_{n−1}) that depend
on n; x_0 is the prompt. Drafts extend to the horizon T, a call ends at its first rejection, and no bonus is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.errors import UserError
from sprinter.laws import overlap, residual, tv_distance
from sprinter.theory.front import batch_laws

__all__ = [
    "Counts",
    "MarkovChain",
    "batch_rejections",
    "expected_rejections",
    "mean_overlap",
    "positions",
    "rejections_by_position",
    "speculative_counts",
]  # fmt: skip


@dataclass(frozen=True)
class MarkovChain:
    """A target and a draft that are non-stationary Markov chains.

    Attributes:
        p, q: ``[T, S, S]`` float64; p[n − 1, s] is the target's law of token n after token s.
        start: law of the prompt token, ``[S]``.

    Raises:
        UserError: shapes that do not fit, or a row that is not a law.
    """

    p: Tensor
    q: Tensor
    start: Tensor

    def __post_init__(self) -> None:
        if self.p.dim() != 3 or self.p.shape != self.q.shape or self.p.shape[1:] != (len(self.start),) * 2:
            raise UserError(
                f"laws of shapes {tuple(self.p.shape)} and {tuple(self.q.shape)} with {len(self.start)} states are no "
                "chain: give p and q as [horizon, states, states]"
            )
        for law in (self.p, self.q, self.start):
            if not bool((law >= 0).all()) or not bool(((law.sum(-1) - 1).abs() < 1e-9).all()):
                raise UserError("a row of the chain is not a law: give entries of at least 0 that sum to 1")

    @classmethod
    def random(cls, states: int = 7, horizon: int = 50, seed: int = 10) -> MarkovChain:
        """The paper's instance (its Appendix F): rows are normalised uniform numbers, the prompt is uniform.

        The paper's seed is 10. Its 16.41 rejections depend on an unpublished order of draws, so this number differs
        slightly.
        """
        at_least("states", states, 2)
        at_least("horizon", horizon, 1)
        numbers = torch.Generator().manual_seed(seed)
        rows = torch.rand(2, horizon, states, states, generator=numbers, dtype=torch.float64)
        p, q = rows / rows.sum(-1, keepdim=True)
        return cls(p, q, torch.full((states,), 1 / states, dtype=torch.float64))

    @property
    def horizon(self) -> int:
        """T, the number of tokens of a text."""
        return len(self.p)

    @property
    def states(self) -> int:
        """S, the size of the vocabulary."""
        return len(self.start)


def positions(start: Tensor, steps: Tensor) -> Tensor:
    """Law of the token before each position, ``[T, S]``, for transition laws ``steps [T, S, S]``."""
    laws = [start]
    for step in steps[:-1]:
        laws.append(laws[-1] @ step)
    return torch.stack(laws)


# --- drafts to the horizon: Theorems 1 and 3 --------------------------------------------------------------------------
def rejections_by_position(chain: MarkovChain) -> Tensor:
    """E_{x<n ~ p} TV(q_n, p_n), the chance that position n is a rejection, ``[T]``."""
    return (positions(chain.start, chain.p) * tv_distance(chain.p, chain.q)).sum(-1)


def expected_rejections(chain: MarkovChain) -> float:
    """Theorem 1: E[N_rej] = Σ_n E_{x<n ~ p} TV(q_n, p_n). By Theorem 2 no unbiased rule has fewer rejections."""
    return float(rejections_by_position(chain).sum())


def batch_rejections(chain: MarkovChain, drafts: int | None) -> float:
    """Theorem 3: E[N_rej] with M independent drafts, of which the accepted one is continued; None is M → ∞.

    Σ_n E_p TV(p, q) − Σ_n Ē_f [TV(p, q) − Π_m TV(p^m, q)], with f(x_{1:n}) = P(x_{1:n}, the n-th token replaced) by the
    recursion of equation 22 and f(prompt) = 1. Ē is a sum weighted by f, which is not a law.
    """
    refused, last = batch_laws(chain.p, chain.q, drafts)
    beyond = (chain.p - chain.q).clamp(min=0)
    saved = tv_distance(chain.p, chain.q) - refused
    before, f, improvement = chain.start, chain.start, 0.0
    for n in range(chain.horizon):
        improvement += float((f * saved[n]).sum())
        first = (
            refused[n].unsqueeze(-1) * last[n]
        )  # rejection at the start of a batch; at other positions only one draft is left
        f = (before - f) @ beyond[n] + f @ first
        before = before @ chain.p[n]
    return expected_rejections(chain) - improvement


# --- drafts of γ tokens ----------------------------------------------------------------------------------------------
class Counts(NamedTuple):
    """Expected counts of one text."""

    rejections: float
    target_calls: float


def speculative_counts(chain: MarkovChain, gamma: int, to_horizon: bool = False) -> Counts:
    """Exact counts of speculative decoding with drafts of γ tokens and a bonus, by dynamic programming.

    The state is (token before the position, draft tokens since the last call). ``to_horizon`` means, as in a method,
    that the last token of the text is drafted too. With it γ >= T is Theorem 1, whose target calls are N_rej + 1 unless
    the last token was rejected.
    """
    at_least("gamma", gamma, 1)
    both, rest = torch.minimum(chain.p, chain.q), tv_distance(chain.p, chain.q)
    state = torch.zeros(gamma + 1, chain.states, dtype=torch.float64)
    state[0] = chain.start
    rejections = calls = 0.0
    for n in range(chain.horizon):
        last = n == chain.horizon - 1
        drafted = state[:gamma] if to_horizon or not last else torch.zeros_like(state[:gamma])
        plain = state.sum(0) - drafted.sum(0)
        refused = drafted.sum(0) * rest[n]
        after = torch.zeros_like(state)
        after[1:] = drafted @ both[n]
        after[0] = refused @ residual(chain.p[n], chain.q[n]) + plain @ chain.p[n]
        rejections += float(refused.sum())
        calls += float(refused.sum() + plain.sum())
        if last:
            calls += float(after[1:].sum())  # the call that checks a draft at the end of the text
        state = after
    return Counts(rejections, calls)


def mean_overlap(chain: MarkovChain) -> float:
    """α: the mean over positions of E_p[Σ min(p, q)], which Leviathan's formulas assume at every position."""
    return float((positions(chain.start, chain.p) * overlap(chain.p, chain.q)).sum() / chain.horizon)
