"""The text of one request, what each model has read of it, and the draft behind it: the only copy, which all share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.successors import Successors

__all__ = [
    "NO_DRAFT", "Chain", "ReadState", "Siblings", "TokenSequence", "Tree", "common_prefix", "depths_of", "paths_of",
]  # fmt: skip

_BLOCK = 128  # tokens that are compared at once


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
        return len(self.tokens) if self.parents is None else max(depths_of(self.parents), default=0)

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


NO_DRAFT = Tree()
"""Nothing was drafted."""


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


@dataclass(slots=True)
class ReadState:
    """What one model has read of a sequence: its first tokens and, until they are judged, nodes of a tree behind them.

    Attributes:
        row: index of the model's row that holds it.
        begun: whether it has begun in that row.
        read: the row holds ``tokens[:read]``; what it holds beyond, trees apart, was discarded. After ``commit`` the
            tokens of nodes in ``path`` count, which are moved next to the others before the next pass.
        after: the model's output after the whole text, if it is known.
        states: by decoder layer, hidden states ``[read, d]`` that are kept for a drafter.
        nodes, parents: of a tree behind the first ``base`` tokens, in the order in which they were given.
        nodes_read: number of nodes that the row holds. root: slot at which the pass over the first one began.
        path: the nodes that stay, each a child of the one before; the others are discarded before the next pass.
        chained: slots up to here were read one after the other, none of them in a tree; None: all.
    """

    row: int = 0
    begun: bool = False
    read: int = 0
    after: Any = None
    states: dict[int, Any] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    nodes_read: int = 0
    root: int = 0
    base: int = 0
    path: Sequence[int] = ()
    chained: int | None = None

    def unread(self, tokens: list[int], end: int) -> list[int]:
        """What of ``tokens[:end]`` the model has not read; at least one, unless its output after them is known or nodes
        of a tree are unread."""
        if self.read == end and self.after is None and not self.nodes:
            self.read -= 1
        return tokens[self.read : end]

    def was_read(
        self, start: int, count: int, layers: Sequence[int] = (), states: Sequence[Tensor] = ()
    ) -> None:
        """A pass over ``count`` tokens from ``start`` on; ``states``: hidden states ``[n, d]`` of each layer."""
        if layers:
            for layer, new in zip(layers, states, strict=True):
                held = self.states.get(layer)
                self.states[layer] = new if held is None else torch.cat([held[:start], new])
        nodes = len(self.nodes)
        self.read += count - nodes + self.nodes_read
        self.nodes_read = nodes

    def cut(self, length: int) -> None:
        """The text was cut to ``length`` tokens."""
        if self.read > length:
            self.read, self.after = length, None

    def grow(self, base: int, nodes: Sequence[int], parents: Sequence[int]) -> None:
        """Nodes are about to be read behind the first ``base`` tokens; ``parents``: -1 for the text."""
        self.base = base
        self.nodes += nodes
        self.parents += parents

    def begin_tree(self, slot: int) -> None:
        """The first node of a tree is read in a pass that begins at a slot."""
        self.root, self.chained = slot, slot if self.chained is None else min(slot, self.chained)

    def end_tree(self) -> None:
        """The tree is gone; the nodes in ``path`` are tokens."""
        self.nodes, self.parents, self.nodes_read, self.path, self.after = [], [], 0, (), None


@dataclass(slots=True)
class TokenSequence:
    """A text as it is written.

    Attributes:
        tokens: token ids: the prompt, final tokens, and the draft of a chain that the target has not judged.
        prompt: length of the prompt.
        final: ``tokens[:final]`` are final.
        scored: the target's laws are known after ``tokens[:scored]``, always fewer than all tokens.
        round: number of the round, part of every draw's address.
        tree: the draft that the target judges next, with its laws; a chain is also in ``tokens[final:]``.
        target, draft: what the models have read.
        successors: what the target said after each token, if the drafter reads that.
    """

    tokens: list[int]
    prompt: int
    final: int
    scored: int
    round: int = 0
    tree: Tree = NO_DRAFT
    target: ReadState = field(default_factory=ReadState)
    draft: ReadState = field(default_factory=ReadState)
    successors: Successors | None = None

    @classmethod
    def begin(cls, prompt: Sequence[int]) -> TokenSequence:
        """A sequence that holds the prompt, at least one token id."""
        n = len(prompt)
        return cls(list(prompt), n, n, n - 1)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> None:
        """Discard all tokens beyond ``length``: what the models have read of them too."""
        del self.tokens[length:]
        self.target.cut(length)
        self.draft.cut(length)

    def commit(self, path: Sequence[int], drafted: Sequence[int]) -> None:
        """Make a path of the tree tokens; all other nodes are discarded.

        Args:
            path: numbers of the nodes in ``tree``, which the target has read. drafted: those of the first of them that
                the draft has read, in the order in which it did.
        """
        base = len(self.tokens)
        self.tokens += [self.tree.tokens[node] for node in path]
        for view, own in ((self.target, path), (self.draft, drafted)):
            if view.nodes:
                view.path, view.read = own, base + len(own)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences of one type."""
    limit = min(len(one), len(other))
    n = 0
    while n < limit and one[n : min(n + _BLOCK, limit)] == other[n : min(n + _BLOCK, limit)]:
        n += _BLOCK
    while n < limit and one[n] == other[n]:
        n += 1
    return min(n, limit)
