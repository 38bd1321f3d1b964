"""Traversal verification: trees judged from the leaves to the text (Weng et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.accept.base import Judge, TargetCall, Verdict
from sprinter.decode.accept.tree import without
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings
from sprinter.laws import wide
from sprinter.random import Purpose

__all__ = ["Traversal"]


@ACCEPT.rule("traversal")
@dataclass(frozen=True, slots=True)
class Traversal(Judge):
    """Tries whole paths, the leaves first (Weng et al. 2025, arXiv 2505.12398): block verification on trees.

    A node is reached with a weight w, 1 at the text, and with p. Its children are tried in order: child x, drawn from
    q, is reached with the weight min(1, w p(x)/q(x)). If no path through it is kept, p <- [w p - q]_+, normalised, and
    w <- r/(r + 1 - w) with r the sum of [w p - q]_+. When no child is left, the path to the node is kept with
    probability w, and the next token is drawn from p. In all, a path to or through a node is kept with the weight that
    it is reached with, however many children it has: a refusal says nothing of what lies below it.

    On a chain this is ``block``. Every kind of siblings is judged by its own law, one-hot for chosen tokens.
    """

    siblings: ClassVar[frozenset[Siblings]] = frozenset(Siblings)
    max_drafts: ClassVar[int] = 8
    lossless: ClassVar[bool] = True  # Weng et al.; by enumeration for every kind of siblings

    def judge(self, call: TargetCall) -> Verdict:
        """Try the paths depth first, the leaf of each before its inner nodes."""
        walk = _Walk(call)
        verdict = walk.visit((), 1.0, range(len(call.tree.branches)), 0)
        assert verdict is not None  # the empty path is kept with weight 1
        return verdict


class _Walk:
    """One traversal of a tree."""

    def __init__(self, call: TargetCall) -> None:
        self._call, self._children = call, call.tree.children()

    def visit(self, path: tuple[int, ...], weight: float, drafts: Sequence[int], row: int) -> Verdict | None:
        """Try the paths through the last node of ``path``, then the path itself; None: none of them is kept.

        Args:
            drafts: those that go through it, of independent ones. row: completes the address of its random number.
        """
        tree, p, _, draws, round, position, _ = self._call
        law = p[path[-1] + 1 if path else 0]
        for child, at, through in self._candidates(path, drafts):
            x, q = tree.tokens[child], tree.law(child)
            reached = weight * float(law[x]) / (1.0 if q is None else float(q[x]))
            verdict = self.visit((*path, child), min(1.0, reached), through, at)
            if verdict is not None:
                return verdict
            law, weight = _refused(law, weight, x, q)
        place = position + len(path)
        if path and not draws.keep([weight], round, place - 1, row)[0]:
            return None
        return Verdict(path, draws.token(law, round, place, Purpose.TARGET), [0.0] * (len(path) + 1))

    def _candidates(
        self, path: tuple[int, ...], drafts: Sequence[int]
    ) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Each child in order, the row of its random number, and the drafts that go through it.

        The token of a second draft through the same child is another draw of it; its own continuation is not used.
        """
        branches, depth, seen = self._call.tree.branches, len(path), set[int]()
        if not branches:
            for child in self._children[path[-1] + 1 if path else 0]:
                yield child, child, ()
        for draft in drafts:
            if depth < len(branches[draft]):
                child = branches[draft][depth]
                through = () if child in seen else [one for one in drafts if branches[one][depth] == child]
                seen.add(child)
                yield child, draft, through


def _refused(law: Tensor, weight: float, x: int, q: Tensor | None) -> tuple[Tensor, float]:
    """p and w of a node after its child x, drawn from q (None: chosen), was refused."""
    if q is None:
        left = weight * max(0.0, 1.0 - float(law[x]))
        rest = without(law, [x])
    else:
        excess = (weight * law - q).clamp_(min=0)
        left = float(wide(excess).sum())
        rest = excess / left if left > 0 else law
    room = left + 1.0 - weight
    return rest, left / room if room > 0 else 1.0
