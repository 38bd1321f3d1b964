"""Drafters that grow trees with the draft model: static, dynamic (EAGLE-2), drawn siblings, widened chains (CaPE)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import ClassVar

from sprinter.decode.checks import Parameters, count, flag
from sprinter.decode.draft import Tips
from sprinter.decode.drafter import Drafter
from sprinter.decode.grow import Root, TreeBuilder, likely
from sprinter.decode.registry import DRAFTER
from sprinter.decode.sequence import Siblings
from sprinter.errors import UserError

__all__ = ["Drawn", "Dynamic", "Static", "Widened"]

_MOST = 512
"""Nodes of a tree, at most: more than a forward pass reads."""


def _counts(name: str, value: object) -> tuple[int, ...]:
    """Whole numbers >= 1 written as ``4x2x2``; raises a UserError for anything else."""
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2})*", str(value)):
        raise UserError(f"{name}={value} is out of range: give whole numbers >= 1, as in 4x2x2")
    return tuple(int(part) for part in str(value).split("x"))


def _widths(value: object) -> tuple[int, ...]:
    """The numbers of children by level; raises a UserError if the tree is too large."""
    widths = _counts("widths", value)
    if (nodes := sum(accumulate(widths, mul))) >= _MOST:
        raise UserError(f"widths={value} is a tree of {nodes} tokens: give one of fewer than {_MOST}")
    return widths


class _OfWidths(Drafter):
    """A tree of fixed shape; subclasses are dataclasses with the field ``widths``."""

    widths: str

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        _widths(self.widths)
        object.__setattr__(self, "widths", str(self.widths))

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(_widths(self.widths))

    def slots(self, depth: int) -> int:
        """Largest number of nodes."""
        return sum(accumulate(_widths(self.widths)[:depth], mul))


@DRAFTER.rule("static")
@dataclass(frozen=True)
class Static(_OfWidths):
    """A tree of fixed shape over the most probable tokens of each node, as Medusa's (Cai et al. 2024, section 2.1).

    Args:
        widths: number of children of each node, by level: ``4x2x2`` has 4 + 8 + 16 nodes.
    """

    widths: str = "4x2x2"
    siblings: ClassVar[Siblings] = Siblings.CHOSEN  # the most probable tokens: no chance is in them

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        return _StaticGrowth(root, _widths(self.widths))


class _Levels(TreeBuilder):
    """A growth that goes on from every node of the newest level."""

    def __init__(self, root: Root, top: int = 0) -> None:
        super().__init__(root, top)
        self.newest = [-1]

    def tips(self) -> list[int]:
        return self.newest


class _StaticGrowth(_Levels):
    def __init__(self, root: Root, widths: Sequence[int]) -> None:
        super().__init__(root, max(widths))
        self._widths = widths

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        count = self._widths[level]
        self.newest = [
            self.add(tip, x)
            for tip, ranked in zip(tips, found.top, strict=True)
            for x, _ in likely(ranked)[:count]
        ]


@DRAFTER.rule("dynamic")
@dataclass(frozen=True)
class Dynamic(Drafter):
    """A tree that grows where the draft model is sure (EAGLE-2, Li et al. 2024, section 4).

    Each level expands the nodes of highest path probability by their most probable tokens. Then all nodes are ranked by
    path probability and the best stay; a node is never above its parent, so paths stay whole.

    Args:
        expand: number of nodes that a level expands, and of children of each.
        depth: number of levels.
        nodes: number of nodes that the target judges, at most.
    """

    expand: int = count(10)
    depth: int = count(6)
    nodes: int = count(60)
    siblings: ClassVar[Siblings] = Siblings.CHOSEN  # the most probable tokens: no chance is in them

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if (slots := max(self.slots(depth) for depth in (1, self.depth))) >= _MOST:
            raise UserError(f"expand={self.expand}, depth={self.depth}, nodes={self.nodes} has a model read a tree of "
                            f"{slots} tokens: give smaller numbers, fewer than {_MOST} are read at once")  # fmt: skip

    @property
    def levels(self) -> int:
        """``depth``."""
        return self.depth

    def slots(self, depth: int) -> int:
        """Number of nodes that either model reads."""
        grown = self.expand + (depth - 1) * self.expand**2
        return max(min(self.nodes, grown), self.expand * (depth - 1))

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        return _DynamicGrowth(root, self.expand, self.nodes)


class _DynamicGrowth(TreeBuilder):
    def __init__(self, root: Root, expand: int, nodes: int) -> None:
        super().__init__(root, expand)
        self._expand, self._nodes = expand, nodes
        self._newest = [-1]
        self._logs: list[float] = []  # ln of each node's path probability

    def tips(self) -> list[int]:
        if self._newest == [-1]:
            return self._newest
        return self._best(self._newest, self._expand)

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        self._newest = []
        for tip, ranked in zip(tips, found.top, strict=True):
            before = self._logs[tip] if tip >= 0 else 0.0
            for x, log in likely(ranked):
                self._newest.append(self.add(tip, x))
                self._logs.append(before + min(log, 0.0))

    def kept(self) -> list[int]:
        return sorted(self._best(range(len(self.tokens)), self._nodes))

    def _best(self, nodes: Sequence[int], count: int) -> list[int]:
        """Those of highest path probability; of equal ones the first, which is never a child before its parent."""
        return sorted(nodes, key=lambda node: (-self._logs[node], node))[:count]


@DRAFTER.rule("drawn")
@dataclass(frozen=True)
class Drawn(_OfWidths):
    """A tree of fixed shape whose siblings are drawn from the law at their parent.

    Args:
        widths: number of children of each node, by level; fewer where the law has fewer tokens.
        replacement: draw each sibling from the whole law (equal ones are possible), and not from what the earlier
            siblings leave of it, normalised.
    """

    widths: str = "3x2x1x1"
    replacement: bool = flag(False)
    siblings: ClassVar[Siblings] = Siblings.DRAWN  # one after the other, from the law at their parent

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        return _DrawnGrowth(root, _widths(self.widths), self.replacement)


class _DrawnGrowth(_Levels):
    needs_laws = True

    def __init__(self, root: Root, widths: Sequence[int], replacement: bool) -> None:
        super().__init__(root)
        self._widths, self._replacement = widths, replacement

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        self.newest, count = [], self._widths[level]
        for i, (tip, whole) in enumerate(zip(tips, found.laws, strict=True)):
            law = whole
            for row in range(i * count, (i + 1) * count):
                x = self.root.token(law, level, row)
                self.newest.append(self.add(tip, x, law, found.raws[i] if found.raws else None))
                if self._replacement:
                    continue
                left = law.clone()
                left[x] = 0.0
                if not (total := left.sum()) > 0:
                    break
                law = left / total


@DRAFTER.rule("widened")
@dataclass(frozen=True)
class Widened(Drafter):
    """A chain with alternatives: where the draft model was unsure of its token, its next likely tokens are judged too
    (CaPE; GliDe with a CaPE, Du et al. 2024).

    The alternatives are leaves beside the chain's token. With q(x) at temperature 1 in (0, 0.3], (0.3, 0.6], (0.6, 0.8]
    or (0.8, 1], there are as many candidates as ``counts`` says, x included.

    Args:
        counts: four numbers of candidates, from the least sure to the surest.
    """

    counts: str = "7x5x3x1"
    siblings: ClassVar[Siblings] = Siblings.WIDENED  # one is drawn, and the others follow from it

    def __post_init__(self) -> None:
        counts = _counts("counts", self.counts)
        if len(counts) != len(_SURE) or max(counts) > _WIDEST:
            raise UserError(
                f"counts={self.counts} is out of range: give four numbers in [1, {_WIDEST}], as in 7x5x3x1"
            )

    def slots(self, depth: int) -> int:
        """Largest number of nodes."""
        return depth * max(_counts("counts", self.counts))

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        return _WidenedGrowth(root, _counts("counts", self.counts))


_SURE = (0.3, 0.6, 0.8, 1.0)
"""Upper ends of the intervals of q(x)."""
_WIDEST = 64


class _WidenedGrowth(_Levels):
    needs_laws = True

    def __init__(self, root: Root, counts: Sequence[int]) -> None:
        # A token that is not among the first four has q(x) <= 1/5, so that its interval is known.
        super().__init__(root, max(4, *counts))
        self._counts = counts

    def grow(self, level: int, tips: Sequence[int], found: Tips) -> None:
        (tip,), (law,), (ranked,) = tips, found.laws, found.top
        x = self.root.token(law, level, 0)
        logs = dict(likely(ranked))
        sure = math.exp(logs.get(x, -math.inf))
        count = next((n for n, end in zip(self._counts, _SURE, strict=True) if sure <= end), self._counts[-1])
        raw = found.raws[0] if found.raws else None
        self.newest = [self.add(tip, x, law, raw)]
        for other in [y for y in logs if y != x][: count - 1]:
            self.add(tip, other, raw=raw)
