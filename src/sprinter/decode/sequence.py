"""The text of one request, and what each model has read of it: the only copy, which loop and engine share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sprinter.decode.tree import Tree

__all__ = ["ReadState", "TokenSequence", "common_prefix"]

_BLOCK = 128  # tokens that are compared at once


@dataclass(slots=True)
class ReadState:
    """What one model has read of a sequence: its first tokens and, until they are judged, nodes of a tree behind them.

    Attributes:
        row: index of the model's row that holds it.
        begun: whether it has begun in that row.
        read: the row holds ``tokens[:read]``; what it holds beyond, trees apart, was discarded. After ``commit`` the
            tokens of ``kept`` nodes count, which are moved next to the others before the next pass.
        after: the model's output after the whole text, if it is known.
        states: by decoder layer, hidden states ``[read, d]`` that are kept for a drafter.
        nodes, parents: of a tree behind the first ``base`` tokens, in the order in which they were given.
        nodes_read: number of nodes that the row holds. root: slot at which the pass over the first one began.
        kept: the nodes that stay, each a child of the one before; the others are discarded before the next pass.
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
    kept: Sequence[int] = ()
    chained: int | None = None

    def unread(self, tokens: list[int], end: int) -> list[int]:
        """What of ``tokens[:end]`` the model has not read; at least one, unless its output after them is known or nodes
        of a tree are unread."""
        if self.read == end and self.after is None and not self.nodes:
            self.read -= 1
        return tokens[self.read : end]

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
        """The tree is gone; the nodes in ``kept`` are tokens."""
        self.nodes, self.parents, self.nodes_read, self.kept, self.after = [], [], 0, (), None


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
    """

    tokens: list[int]
    prompt: int
    final: int
    scored: int
    round: int = 0
    tree: Tree = field(default_factory=Tree)
    target: ReadState = field(default_factory=ReadState)
    draft: ReadState = field(default_factory=ReadState)

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
        for view, kept in ((self.target, path), (self.draft, drafted)):
            if view.nodes:
                view.kept, view.read = kept, base + len(kept)


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two sequences of one type."""
    limit = min(len(one), len(other))
    n = 0
    while n < limit and one[n : min(n + _BLOCK, limit)] == other[n : min(n + _BLOCK, limit)]:
        n += _BLOCK
    while n < limit and one[n] == other[n]:
        n += 1
    return min(n, limit)
