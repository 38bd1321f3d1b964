"""Trees whose siblings were chosen without chance: the most probable tokens of the draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.accept.tree import Keep, TreeRule, without
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings, Tree
from sprinter.laws import wide

__all__ = ["OneHot"]


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
