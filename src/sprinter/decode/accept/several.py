"""Accept rules that choose among several drafts: batch, SpecInfer, SpecTr's k-SEQ."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import Judge, TargetCall, Verdict
from sprinter.decode.accept.tree import Keep, recursion
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Chain, Siblings
from sprinter.laws import wide
from sprinter.random import Purpose

__all__ = ["Batch", "SeveralRule", "SpecInfer", "SpecTr"]


class SeveralRule(Judge):
    """Judges several chains drawn independently from q after one prefix. Each subclass is lossless by its own theorem.

    At each depth the candidates are the next tokens of the drafts that agree with the tokens accepted so far. One is
    accepted, or all are rejected and a replacement ends the round.
    """

    max_drafts: ClassVar[int] = 8
    siblings: ClassVar[frozenset[Siblings]] = frozenset({Siblings.ALONE, Siblings.INDEPENDENT})
    lossless: ClassVar[bool] = True  # each subclass keeps the target's law

    @abstractmethod
    def pick(self, p: Tensor, q: Tensor, candidates: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """Return the index of the accepted candidate, or None, and the law of the replacement. ``p, q [V]``."""

    def follow(self, chains: Sequence[Chain], rows: list[int], index: int, depth: int) -> list[int]:
        """The drafts that stay in the comparison after candidate ``index`` was accepted at ``depth``: those with its
        token."""
        accepted = chains[rows[index]].tokens[depth]
        return [row for row in rows if chains[row].tokens[depth] == accepted]

    def judge(self, call: TargetCall) -> Verdict:
        """Judge the drafts depth by depth. A draft's number is part of the address of its random numbers."""
        tree, p, _, draws, round, position, _ = call
        branches, chains = tree.branches or [range(len(tree.tokens))], tree.chains()
        rows, depth, node = list(range(len(chains))), 0, -1
        # Drafts that are compared share a prefix: the law after it, if there is one, has given each its next token.
        while depth < len(chains[rows[0]].tokens):
            place, candidates = position + depth, [chains[row].tokens[depth] for row in rows]

            def keep(index: int, chance: float, place: int = place, rows: list[int] = rows) -> bool:
                return draws.keep([chance], round, place, rows[index])[0]

            index, law = self.pick(p[node + 1], chains[rows[0]].laws[depth], candidates, keep)
            if index is None:
                token = draws.token(law, round, place, Purpose.TARGET)
                return Verdict(branches[rows[0]][:depth], token, [0.0] * (depth + 1))
            rows = self.follow(chains, rows, index, depth)
            node, depth = branches[rows[0]][depth], depth + 1
        token = draws.token(p[node + 1], round, position + depth, Purpose.TARGET)
        return Verdict(branches[rows[0]], token, [0.0] * (depth + 1))


@ACCEPT.rule("specinfer")
@dataclass(frozen=True, slots=True)
class SpecInfer(SeveralRule):
    """Tries the candidates in order with p^m at every depth, of all drafts that agree (SpecInfer, Miao et al. 2024)."""

    def pick(self, p: Tensor, q: Tensor, candidates: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """Try the candidates in order with p^m."""
        return recursion(p, candidates, [q] * len(candidates), keep)


@ACCEPT.rule("batch")
@dataclass(frozen=True, slots=True)
class Batch(SpecInfer):
    """Tries the first tokens of M drafts, then judges the accepted draft alone by the exact rule (Yin et al. 2024,
    Algorithm 4, corrected).

    The last branch of the printed algorithm runs after the first draft and subtracts q twice, which is biased. Here all
    M first tokens are tried in order with p^m, and a token is drawn from p^{M+1} only if all are rejected.
    """

    def follow(self, chains: Sequence[Chain], rows: list[int], index: int, depth: int) -> list[int]:
        """The accepted draft only."""
        return [rows[index]]


@ACCEPT.rule("spectr")
@dataclass(frozen=True, slots=True)
class SpecTr(SeveralRule):
    """k-SEQ (SpecTr, Sun et al. 2023) at every depth: accept with probability min(1, p/(ρq)), ρ in [1, k].

    ρ solves 1 − (1 − β)^k = ρβ with β = Σ min(q, p/ρ); after k rejections draw from p − min(q, p/ρ)·(1 − (1 − β)^k)/β.
    """

    def pick(self, p: Tensor, q: Tensor, candidates: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """k-SEQ with k candidates."""
        k = len(candidates)
        exact_p, exact_q = wide(p), wide(q)
        rho, beta = _solve_rho(exact_p, exact_q, k)
        for index, x in enumerate(candidates):
            if keep(index, min(1.0, float(p[x]) / (rho * float(q[x])))):
                return index, p
        refused = (1 - (1 - beta) ** k) / beta if beta > 0 else 0.0
        left = (exact_p - torch.minimum(exact_q, exact_p / rho) * refused).clamp(min=0)
        total = left.sum()
        return None, left.div(total).to(p) if total > 0 else p


def _solve_rho(p: Tensor, q: Tensor, k: int) -> tuple[float, float]:
    """(ρ, β_ρ) with 1 − (1 − β_ρ)^k = ρ·β_ρ, by bisection; ρ is rounded up, so that the residual is a law."""
    if k == 1:
        return 1.0, float(torch.minimum(p, q).sum())
    low, high = 1.0, float(k)
    for _ in range(60):
        rho = (low + high) / 2
        beta = float(torch.minimum(q, p / rho).sum())
        if 1 - (1 - beta) ** k > rho * beta:
            low = rho
        else:
            high = rho
    return high, float(torch.minimum(q, p / high).sum())
