"""Trees of draft tokens: judged by accept rules, built and followed by drivers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

__all__ = ["Chain", "Tree", "TreeBuilder", "TreeText"]


class Chain(NamedTuple):
    """Draft tokens in order, with the laws ``[V]`` that they were drawn from, and raw laws if the rule reads them."""

    tokens: Sequence[int]
    laws: Sequence[Tensor]
    raws: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """The untrusted draft tokens of a round, for an accept rule to judge. A chain is a tree without branches.

    Attributes:
        tokens: one token per node; parents come before their children.
        laws: the law ``[V]`` that each token was drawn from. raws: temperature-1 laws, if the rule reads them.
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
        if self.parents is None:
            return len(self.tokens)
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return max(depths, default=0)

    def is_leaf(self, node: int) -> bool:
        """Whether ``node`` has no child; -1 is the text."""
        return node + 1 == len(self.tokens) if self.parents is None else node not in self.parents

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


class TreeBuilder:
    """Merges several drafts of one prefix into a tree, token by token; drafts with a common prefix share nodes.

    Args:
        count: number of drafts.

    Attributes:
        tokens, parents: as in ``Tree``. branches: the nodes of each draft so far.
    """

    def __init__(self, count: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.branches: list[list[int]] = [[] for _ in range(count)]
        self._children: dict[tuple[int, int], int] = {}

    @property
    def whole(self) -> tuple[tuple[int, ...], ...]:
        """``branches`` as ``Draft`` holds them."""
        return tuple(tuple(branch) for branch in self.branches)

    def texts(self) -> list[tuple[int, ...]]:
        """The tokens of each draft so far."""
        return [tuple(self.tokens[node] for node in branch) for branch in self.branches]

    def add(self, draft: int, token: int) -> int | None:
        """Append a token to a draft; returns the new node, or None if another draft has added the same node."""
        branch = self.branches[draft]
        place = (branch[-1] if branch else -1, token)
        known = self._children.get(place)
        node = len(self.tokens) if known is None else known
        if known is None:
            self._children[place] = node
            self.tokens.append(token)
            self.parents.append(place[0])
        branch.append(node)
        return node if known is None else None


class TreeText:
    """A model's text, optionally followed by a tree, for drivers without a KV cache.

    Args:
        prompt: token ids.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text, self._nodes, self._parents = list(prompt), list[int](), list[int]()

    def length(self, path: Sequence[int]) -> int:
        """Length of the text with these nodes of the tree appended, in tokens."""
        return len(self._text) + len(path)

    def follow(self, start: int, tokens: Sequence[int], path: Sequence[int]) -> list[int]:
        """Keep the nodes in ``path``, rewind to ``start``, append ``tokens``; returns the text, to be extended."""
        self._text += [self._nodes[node] for node in path]
        self._text[start:] = tokens
        self._nodes, self._parents = [], []
        return self._text

    def grow(self, tokens: Sequence[int], parents: Sequence[int] | None) -> None:
        """Append nodes of a tree to the text."""
        self._nodes, self._parents = list(tokens), list(parents or ())

    def paths(self) -> list[tuple[int, ...]]:
        """For each node, the tokens from the text to the node."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self._nodes, self._parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        return paths
