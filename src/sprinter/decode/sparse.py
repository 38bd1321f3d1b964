"""A static tree whose nodes are named one by one, and how Medusa chooses them by the accuracies of its heads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sprinter.decode.checks import Parameters, count
from sprinter.decode.draft import Tips
from sprinter.decode.drafter import Drafter
from sprinter.decode.grow import Root, TreeBuilder, likely
from sprinter.decode.registry import DRAFTER
from sprinter.decode.sequence import Siblings
from sprinter.decode.trust import RECORDED
from sprinter.errors import UserError

__all__ = ["Sparse", "choose_nodes"]

_RANKS = 10
"""Ranks are one digit each, as in the published trees of Medusa."""


@DRAFTER.rule("sparse")
@dataclass(frozen=True)
class Sparse(Drafter):
    """A tree of fixed shape that is given node by node, as Medusa's (Cai et al. 2024, section 2.3.3).

    A node is named by the ranks of the tokens on its path, from 0, the most probable token: ``0x1x00x02`` has the two
    most probable tokens, and after the first of them the first and third.

    Args:
        nodes: number of nodes, at most; of a recorded tree as many, in the order in which they are chosen.
        tree: the nodes; "recorded": chosen by the accuracies of the heads that draft.
    """

    nodes: int = count(24)
    tree: str = RECORDED
    siblings: ClassVar[Siblings] = Siblings.CHOSEN  # the most probable tokens: no chance is in them

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if self.nodes >= 512:
            raise UserError(
                f"nodes={self.nodes} is out of range: give fewer than 512, which are read at once"
            )
        object.__setattr__(self, "tree", str(self.tree))
        if self.tree == RECORDED:
            return
        if not re.fullmatch(r"\d+(x\d+)*", self.tree):
            raise UserError(
                f"tree={self.tree} is out of range: give nodes by the ranks on their paths, as in 0x1x00x02"
            )
        own = self._paths
        if lost := next((path for path in own if path[:-1] and path[:-1] not in own), None):
            raise UserError(f"tree={self.tree} has node {lost} without its parent {lost[:-1]}: give that too")
        if len(set(own)) < len(own) or len(own) > self.nodes:
            raise UserError(
                f"tree={self.tree} names {len(own)} nodes: give different ones, at most nodes={self.nodes}"
            )

    @property
    def _paths(self) -> list[str]:
        return self.tree.split("x")

    @property
    def levels(self) -> int:
        """Number of levels; of a tree that is not chosen yet, the largest."""
        return self.nodes if self.tree == RECORDED else max(map(len, self._paths))

    def slots(self, depth: int) -> int:
        """Number of nodes up to a level."""
        return self.nodes if self.tree == RECORDED else sum(len(path) <= depth for path in self._paths)

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        if self.tree == RECORDED:
            raise UserError(_NO_SHAPE)
        return _SparseGrowth(root, self._paths)

    def settle(self, accuracies: Sequence[Sequence[float]]) -> Sparse:
        """The tree that Medusa's greedy choice gives, if it is to be chosen.

        Raises:
            UserError: there are no accuracies.
        """
        if self.tree != RECORDED:
            return self
        if not accuracies:
            raise UserError(_NO_SHAPE)
        return replace(self, tree="x".join(sorted(choose_nodes(accuracies, self.nodes), key=_by_level)))


_NO_SHAPE = (
    "tree=recorded is a tree that the accuracies of heads that draft choose, and here are none: give heads=[...] "
    "(--head) of 'sprinter draft train', or the nodes, as in tree=0x1x00x02"
)


def choose_nodes(accuracies: Sequence[Sequence[float]], count: int) -> list[str]:
    """The ``count`` nodes of largest expected acceptance, in the order in which they are chosen.

    A node's expected contribution is the product of the accuracies along its path, as if heads erred independently; the
    largest that continues the tree is added until it has ``count`` nodes (Cai et al. 2024, section 2.3.3).

    Args:
        accuracies: as in ``DraftHeads``.
    """
    chosen: list[str] = []
    open_nodes = {str(rank): value for rank, value in enumerate(accuracies[0][:_RANKS])}
    while open_nodes and len(chosen) < count:
        path = max(open_nodes, key=lambda one: (open_nodes[one], -len(one), one))
        value = open_nodes.pop(path)
        if value <= 0:
            break
        chosen.append(path)
        if len(path) < len(accuracies):
            for rank, own in enumerate(accuracies[len(path)][:_RANKS]):
                open_nodes[f"{path}{rank}"] = value * own
    return chosen or ["0"]


def _by_level(path: str) -> tuple[int, str]:
    return len(path), path


class _SparseGrowth(TreeBuilder):
    def __init__(self, root: Root, paths: Sequence[str]) -> None:
        super().__init__(root, 1 + max(int(path[-1]) for path in paths))
        self._ranks: dict[str, list[int]] = {}
        for path in sorted(paths, key=_by_level):
            self._ranks.setdefault(path[:-1], []).append(int(path[-1]))
        self._names = {-1: ""}
        self._newest = [-1]

    def tips(self) -> list[int]:
        return [node for node in self._newest if self._names[node] in self._ranks]

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        self._newest = []
        for tip, best in zip(tips, found.top, strict=True):
            tokens, name = [x for x, _ in likely(best)], self._names[tip]
            for rank in self._ranks[name]:
                if rank < len(tokens):
                    node = self.add(tip, tokens[rank])
                    self._names[node] = f"{name}{rank}"
                    self._newest.append(node)
