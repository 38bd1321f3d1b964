"""Trees of draft tokens as they grow: level by level, from the draft model's laws at the tips.

The loop asks a ``TreeBuilder`` which tips to read, asks the draft model for its laws there (``AskTips``), and lets the
growth add nodes. A growth holds no model, and draws its tokens by address from the draws of the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.draft import AskTips, Ranked, Tips
from sprinter.decode.sequence import TokenSequence, Tree
from sprinter.random import Draws, Purpose

__all__ = ["NO_LAW", "Independent", "Root", "TreeBuilder", "grow_from", "likely", "ranked"]

NO_LAW = torch.empty(0)
"""In place of the law of a token that was chosen without chance."""


@dataclass(frozen=True, slots=True)
class Root:
    """Where a tree grows: the addresses of its draws.

    Attributes:
        round: number of the round. position: of the first token of the tree, in tokens from the beginning of the text.
        depth: largest number of levels.
    """

    draws: Draws
    round: int
    position: int
    depth: int

    def token(self, law: Tensor, level: int, row: int) -> int:
        """One token from ``law [V]`` for a node at a level, from 0; ``row`` is different for each draw of a level."""
        return self.draws.token(law, self.round, self.position + level, Purpose.DRAFT, row)


class TreeBuilder(ABC):
    """The tree of one round. A subclass says where it grows (``tips``) and what is added there (``grow``).

    Attributes:
        needs_laws: whether ``grow`` reads processed laws. top: number of most probable tokens that it reads at a tip.
        tokens, parents, laws, raws: of all nodes so far, as in ``Tree``.
    """

    needs_laws: ClassVar[bool] = False

    def __init__(self, root: Root, top: int = 0) -> None:
        self.root, self.top = root, top
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.laws: list[Tensor] = []
        self.raws: list[Tensor] = []
        self._read: dict[int, int] = {-1: -1}  # node -> its number among those that the draft model reads

    @abstractmethod
    def tips(self) -> list[int]:
        """The nodes of the newest level to grow from, the best path's first; [] ends the tree."""

    @abstractmethod
    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        """Add the nodes of a level, from 0, given the laws at its tips (-1: the text)."""

    def kept(self) -> list[int]:
        """The nodes that the target judges, parents before their children; all, if they are not reranked."""
        return list(range(len(self.tokens)))

    def add(self, parent: int, token: int, law: Tensor = NO_LAW, raw: Tensor | None = None) -> int:
        """Add a node; returns its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.laws.append(law)
        if raw is not None:
            self.raws.append(raw)
        return len(self.tokens) - 1

    def ask(self, sequence: TokenSequence, tips: Sequence[int]) -> AskTips:
        """The request for the laws at some tips behind a sequence."""
        laws, top = self.needs_laws, self.top
        if list(tips) == [-1]:
            return AskTips(sequence, [()], laws=laws, top=top, depth=self.root.depth)
        parents = [self._read[self.parents[tip]] for tip in tips]
        for tip in tips:
            self._read[tip] = len(self._read) - 1
        nodes = [self.tokens[tip] for tip in tips]
        return AskTips(sequence, [self._path(tip) for tip in tips], nodes, parents, laws, top)

    def _path(self, node: int) -> tuple[int, ...]:
        """The tokens from the sequence to a node."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return tuple(path[::-1])

    def finish(self) -> tuple[Tree, list[int]]:
        """The tree for the target to judge; and for each of its nodes the number that ``AskTips`` gave it, or -1."""
        kept = self.kept()
        number = {-1: -1} | {node: i for i, node in enumerate(kept)}
        tree = Tree(
            [self.tokens[node] for node in kept],
            [self.laws[node] for node in kept],
            [self.raws[node] for node in kept] if self.raws else (),
            [number[self.parents[node]] for node in kept],
            self.branches(),
        )
        return tree, [self._read.get(node, -1) for node in kept]

    def branches(self) -> Sequence[Sequence[int]]:
        """The nodes of each independent draft; () if siblings were made in another way."""
        return ()


class Independent(TreeBuilder):
    """Several drafts, drawn independently of each other; those with a common prefix share nodes.

    Args:
        count: number of drafts.
    """

    needs_laws = True

    def __init__(self, root: Root, count: int) -> None:
        super().__init__(root)
        self._branches: list[list[int]] = [[] for _ in range(count)]
        self._children: dict[tuple[int, int], int] = {}
        self._open = [*range(count)]  # drafts that go on

    def branches(self) -> Sequence[Sequence[int]]:
        """The nodes of each draft so far."""
        return self._branches

    def tips(self) -> list[int]:
        """The last node of each draft that goes on."""
        return list(dict.fromkeys(self._tip(draft) for draft in self._open))

    def _tip(self, draft: int) -> int:
        branch = self._branches[draft]
        return branch[-1] if branch else -1

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        """Draw one token for each draft from the law at its last node."""
        index = {tip: i for i, tip in enumerate(tips)}
        self._open = [draft for draft in self._open if self._tip(draft) in index]
        for draft in self._open:
            branch, tip = self._branches[draft], self._tip(draft)
            law = found.laws[index[tip]]
            token = self.root.token(law, level, draft)
            node = self._children.get((tip, token))
            if node is None:
                raw = found.raws[index[tip]] if found.raws else None
                node = self._children[tip, token] = self.add(tip, token, law, raw)
            branch.append(node)


def grow_from(growth: TreeBuilder, law: Callable[[tuple[int, ...]], Tensor]) -> dict[int, tuple[int, ...]]:
    """Grow a whole tree from laws ``[V]`` by path, without a model; returns the path of each node, -1 is the text."""
    tips, paths = [-1], {-1: tuple[int, ...]()}
    for level in range(growth.root.depth):
        laws = torch.stack([law(paths[tip]) for tip in tips])
        growth.grow(level, tips, Tips(list(laws), ranked(laws.log(), growth.top), raws=list(laws)))
        for node in range(len(paths) - 1, len(growth.tokens)):
            paths[node] = (*paths[growth.parents[node]], growth.tokens[node])
        tips = growth.tips()
    return paths


def ranked(logs: Tensor, count: int) -> list[Ranked]:
    """The ``count`` most probable tokens of each law, given ln q ``[m, V]`` at temperature 1; [] for a count of 0."""
    if not count:
        return []
    best = logs.topk(min(count, logs.shape[-1]), -1)
    return [Ranked(*one) for one in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def likely(best: Ranked) -> list[tuple[int, float]]:
    """The most probable tokens with ln q, without those that cannot be drawn."""
    return [(x, log) for x, log in zip(best.tokens, best.logs, strict=True) if log > -torch.inf]
