"""Accept rules for trees: their base class, the recursion over siblings, and the rules for siblings of two kinds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.accept.base import Judge, TargetCall, Verdict
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings, Tree
from sprinter.laws import residual, wide
from sprinter.random import Purpose

__all__ = ["Keep", "OneHot", "TreeRule", "Without", "recursion", "without"]

Keep = Callable[[int, float], bool]
"""(index of the candidate, its acceptance probability) -> whether it is kept."""


class TreeRule(Judge):
    """Judges a tree from the text down: at each node one of the children is accepted, or a replacement ends the round.

    Each subclass names the kinds of ``siblings`` that it is lossless for, and defines ``pick``.
    """

    siblings: ClassVar[frozenset[Siblings]] = frozenset()
    lossless: ClassVar[bool] = True  # each subclass keeps the target's law

    @abstractmethod
    def pick(self, p: Tensor, tree: Tree, children: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """Return the index of the accepted child, or None, and the law of the replacement.

        Args:
            p: the target's law ``[V]`` after their parent. children: nodes of the tree, at least one.
        """

    def judge(self, call: TargetCall) -> Verdict:
        """Judge the children of each accepted node. A node's number is part of the address of its random number."""
        tree, p, _, draws, round, position, _ = call
        children, path = tree.children(), list[int]()
        while True:
            node, place = path[-1] if path else -1, position + len(path)
            own, law = children[node + 1], p[node + 1]

            def keep(index: int, chance: float, place: int = place, own: list[int] = own) -> bool:
                return draws.keep([chance], round, place, own[index])[0]

            index, law = self.pick(law, tree, own, keep) if own else (None, law)
            if index is None:
                token = draws.token(law, round, place, Purpose.TARGET)
                return Verdict(path, token, [0.0] * (len(path) + 1))
            path.append(own[index])


def recursion(
    p: Tensor, candidates: Sequence[int], laws: Sequence[Tensor | None], keep: Keep
) -> tuple[int | None, Tensor]:
    """Try candidates in order: keep x with min(1, p/q), else go on with p <- [p - q]_+, normalised.

    Args:
        candidates: tokens. laws: the law q ``[V]`` that each was drawn from, given the earlier ones; None: one-hot.

    Returns:
        The index of the candidate that is kept, or None, and the p that is left.
    """
    for index, (x, q) in enumerate(zip(candidates, laws, strict=True)):
        if keep(index, float(p[x] if q is None else (p[x] / q[x]).clamp(max=1))):
            return index, p
        p = without(p, [x]) if q is None else residual(p, q)
    return None, p


def without(p: Tensor, tokens: Sequence[int]) -> Tensor:
    """``p [V]`` without some tokens, normalised; p itself if nothing is left."""
    left = p.clone()
    left[list(tokens)] = 0.0
    total = left.sum()
    return left / total if total > 0 else p


@ACCEPT.rule("onehot")
@dataclass(frozen=True, slots=True)
class OneHot(TreeRule):
    """Accepts each of the siblings with the mass that p has left for it (as EAGLE's sampler does, Li et al. 2024).

    A token that was chosen without chance has a one-hot law, whatever the draft model says. Exact acceptance then keeps
    x with p(x), and goes on with p without x, normalised: one of distinct siblings is accepted with its own p(x).
    """

    siblings: ClassVar[frozenset[Siblings]] = frozenset({Siblings.CHOSEN})

    def pick(self, p: Tensor, tree: Tree, children: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """``recursion`` with one-hot laws, of which only the mass that is left is followed."""
        tokens = [tree.tokens[node] for node in children]
        left = 1.0
        for index, mass in enumerate(wide(p[tokens]).tolist()):
            if keep(index, min(1.0, mass / left) if left > 0 else 0.0):
                return index, p
            left -= mass
        return None, without(p, tokens)


@ACCEPT.rule("without")
@dataclass(frozen=True, slots=True)
class Without(TreeRule):
    """Tries siblings in order, each against the law that it was drawn from given the earlier ones (recursive rejection
    sampling: Jeon et al. 2024, arXiv 2402.14160; SpecInfer, Miao et al. 2024, for independent siblings).

    The first sibling has q, the second q without the first one's token, normalised, and so on; after each refusal
    p <- [p - q]_+, normalised. A sibling that was chosen once the earlier ones are known has a one-hot law, for which
    this is p without its token: so widened chains (CaPE) are judged exactly too.
    """

    siblings: ClassVar[frozenset[Siblings]] = frozenset({Siblings.ALONE, Siblings.DRAWN, Siblings.WIDENED})

    def pick(self, p: Tensor, tree: Tree, children: Sequence[int], keep: Keep) -> tuple[int | None, Tensor]:
        """The recursion over the children's own laws."""
        return recursion(
            p, [tree.tokens[node] for node in children], [tree.law(node) for node in children], keep
        )
