"""Trees whose siblings were drawn without replacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sprinter.decode.accept.tree import Keep, TreeRule, recursion
from sprinter.decode.registry import ACCEPT
from sprinter.decode.sequence import Siblings, Tree

__all__ = ["Without"]


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
