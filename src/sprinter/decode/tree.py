"""Trees of draft tokens: judged by accept rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

__all__ = ["Chain", "Siblings", "Tree", "depths_of", "paths_of"]


class Chain(NamedTuple):
    """Draft tokens in order, with the laws ``[V]`` that they were drawn from, and raw laws if the rule reads them."""

    tokens: Sequence[int]
    laws: Sequence[Tensor]
    raws: Sequence[Tensor] = ()


class Siblings(StrEnum):
    """How a drafter makes the nodes that follow one node: accept rules are exact for some kinds alone."""

    ALONE = "alone"  # chains: one node, drawn from its law
    INDEPENDENT = "independent"  # whole drafts, drawn independently; those with a common prefix share nodes
    DRAWN = "drawn"  # drawn one after the other, each node with its law given the earlier ones
    WIDENED = "widened"  # the first is drawn, the others are chosen without chance once it is known
    CHOSEN = "chosen"  # chosen without chance, and all different


@dataclass(frozen=True, slots=True)
class Tree:
    """The untrusted draft tokens of a round, for an accept rule to judge. A chain is a tree without branches.

    Attributes:
        tokens: one token per node; parents come before their children.
        laws: the law ``[V]`` that each token was drawn from, given its earlier siblings; empty ``[0]`` for a token that
            was chosen without chance.
        raws: temperature-1 laws, if the rule reads them.
        parents: the parent of each node, -1 for the text; None: a chain, in which each node follows the previous one.
        branches: the nodes of each independent draft. Drafts with a common prefix share nodes.
    """

    tokens: Sequence[int] = ()
    laws: Sequence[Tensor] = ()
    raws: Sequence[Tensor] = ()
    parents: Sequence[int] | None = None
    branches: Sequence[Sequence[int]] = ()

    @property
    def depth(self) -> int:
        """Number of tokens from the text to the deepest leaf."""
        return max(self.depths(), default=0)

    def depths(self) -> list[int]:
        """Number of tokens from the text to each node, itself included."""
        if self.parents is None:
            return list(range(1, len(self.tokens) + 1))
        return depths_of(self.parents)

    def is_leaf(self, node: int) -> bool:
        """Whether ``node`` has no child; -1 is the text."""
        return node + 1 == len(self.tokens) if self.parents is None else node not in self.parents

    def children(self) -> list[list[int]]:
        """The nodes that follow the text (entry 0) and each node i (entry i + 1), in the order of the tree."""
        found: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(
            range(-1, len(self.tokens) - 1) if self.parents is None else self.parents
        ):
            found[parent + 1].append(node)
        return found

    def law(self, node: int) -> Tensor | None:
        """The law ``[V]`` that a node's token was drawn from; None: it was chosen without chance."""
        law = self.laws[node]
        return law if law.numel() else None

    def path_to(self, node: int) -> list[int]:
        """The nodes from the text to ``node``, itself included; [] for -1."""
        if self.parents is None:
            return list(range(node + 1))
        path: list[int] = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def chains(self) -> list[Chain]:
        """The independent drafts as chains; a tree without branches is one chain."""
        if not self.branches:
            return [Chain(self.tokens, self.laws, self.raws)]
        return [
            Chain(
                [self.tokens[node] for node in nodes],
                [self.laws[node] for node in nodes],
                [self.raws[node] for node in nodes] if self.raws else (),
            )
            for nodes in self.branches
        ]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Number of tokens from the text to each node of a tree, itself included."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The tokens from the text to each node of a tree, its own included."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
