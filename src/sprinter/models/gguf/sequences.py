"""Trees in a llama.cpp context: a token of a tree belongs to the sequence of each path that runs through it.

A query of llama.cpp sees the cells of its sequence up to its own position. So each leaf of a tree has a sequence: the
cells of the prefix and of the leaf's path are marked as its own, whichever it shares with others. One of them is the
row's own sequence, whose number is the row's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sprinter.errors import RowsError, SprinterError
from sprinter.models.runners.tree import RowTree

__all__ = ["MOST", "TreeSequences"]

MOST = 256  # LLAMA_MAX_SEQ


@dataclass(slots=True)
class _Spread:
    """Sequences of a row's tree. ``root``: length of the linear prefix; ``paths``: sequence -> slots of the tree."""

    root: int
    paths: dict[int, list[int]]

    def through(self, slot: int, row: int) -> int:
        """A sequence that runs through a slot; that of the row if it belongs to the prefix."""
        return next((one for one, path in self.paths.items() if slot in path), row)

    def upto(self, length: int) -> _Spread:
        """What is left of it in the row's first ``length`` slots; sequences that nothing needs are left out."""
        left, seen = _Spread(self.root, {}), set[int]()
        for one, path in self.paths.items():
            kept = [slot for slot in path if slot < length]
            if not seen.issuperset(kept):
                left.paths[one] = kept
                seen.update(kept)
        return left


class TreeSequences:
    """The sequences of trees. What is free is what no tree holds, so that an interrupt cannot lose one.

    Args:
        llama: the library. memory: of the context. rows: number of rows. count: of all sequences of the context.
    """

    def __init__(self, llama: Any, memory: Any, rows: int, count: int) -> None:
        self._llama, self._memory, self._count, self._rows = llama, memory, count, rows
        self._spread: dict[int, _Spread] = {}

    def __contains__(self, row: int) -> bool:
        """Whether a row holds a tree that is spread over sequences."""
        return row in self._spread

    def mark(self, row: int, tree: RowTree, count: int) -> tuple[NDArray[np.int32], list[list[int]]]:
        """Positions of the last ``count`` tokens of a tree with branches, before they are read, and the sequences of
        each.

        Raises:
            RowsError: the context has too few sequences.
        """
        first = tree.end - count
        own = self._begin(row, tree, first)
        depth: list[int] = []
        for parent in tree.parents:
            depth.append(0 if parent < tree.root else depth[parent - tree.root] + 1)
        parents = dict(enumerate(tree.parents[first - tree.root :], first))
        sequences: dict[int, list[int]] = {slot: [] for slot in parents}
        inner, free = {*parents.values()}, self._free()
        for leaf in (slot for slot in parents if slot not in inner):
            new = [leaf]
            while (parent := parents[new[-1]]) >= first:
                new.append(parent)
            new.reverse()
            sequence = own.through(parent, row)
            path = own.paths[sequence]
            if parent != (path[-1] if path else tree.root - 1):  # another token follows it there
                if not free:
                    raise RowsError(
                        f"llama.cpp holds {self._count} sequences here, one for each leaf of a tree, and the trees of "
                        f"{self._rows} row(s) need more: use smaller trees"
                        + (", or fewer rows" * (self._rows > 1))
                    )
                before = [slot for slot in path if slot <= parent]
                source, sequence = sequence, free.pop()
                own.paths[sequence] = path = before  # first, so that it counts as held
                self._copy(source, sequence, tree.root + len(before))
            path += new
            for slot in new:
                sequences[slot].append(sequence)
        position = np.array([tree.root + depth[slot - tree.root] for slot in parents], np.int32)
        return position, [*sequences.values()]

    def cut(self, row: int, length: int, tree: RowTree | None) -> None:
        """Forget the slots of a row from ``length`` on; ``tree``: what is then left of its tree, if not linear text.

        If no branches are left, the rest is in the row's own sequence again.
        """
        own = self._spread.get(row)
        if own is None:
            return
        if tree is None or not tree.branches:
            self.straighten(row, range(own.root, length))
            return
        left = own.upto(length)
        for sequence, path in own.paths.items():
            kept = left.paths.get(sequence, [])
            if len(kept) < len(path):
                self._remove(sequence, own.root + len(kept) if kept or sequence == row else 0)
        left.paths.setdefault(row, [])
        self._spread[row] = left

    def straighten(self, row: int, path: Sequence[int]) -> None:
        """Move a path of a row's tree into the row's own sequence, and forget the rest of the tree."""
        own = self._spread[row]
        through = own.through(path[-1], row) if path else row
        if through == row:
            self._remove(row, own.root + len(path))
        else:
            self._remove(row, own.root)
            self._llama.llama_memory_seq_cp(self._memory, through, row, own.root, own.root + len(path))
        self.drop(row)

    def copy(self, from_row: int, row: int, length: int, tree: RowTree | None) -> None:
        """Give a row, whose own contents are forgotten, the first ``length`` slots of another's; ``tree``: what they
        hold of its tree.

        Raises:
            RowsError: the context has too few sequences; nothing has changed then.
        """
        given = self._spread.get(from_row)
        if given is None or tree is None or not tree.branches:
            source = from_row if given is None else given.through(length - 1, from_row)
            self._clear(row)
            self._copy(source, row, length)
            return
        left = given.upto(length)
        free = [*self._free(), *(one for one in self._paths_of(row) if one != row)]
        others = [one for one in left.paths if one != from_row]
        if len(others) > len(free):
            raise RowsError(
                f"llama.cpp holds {self._count} sequences here, too few for another tree: use smaller trees, or fewer "
                "rows"
            )
        self._clear(row)
        new = {from_row: row, **dict(zip(others, free, strict=False))}
        self._spread[row] = _Spread(
            left.root, {row: [], **{new[one]: path for one, path in left.paths.items()}}
        )
        self._copy(from_row, row, left.root)
        for sequence, path in left.paths.items():
            self._copy(sequence, new[sequence], left.root + len(path))

    def drop(self, row: int) -> None:
        """Forget all sequences of a row's tree but the row's own."""
        for sequence in self._paths_of(row):
            if sequence != row:
                self._remove(sequence, 0)
        self._spread.pop(row, None)

    def reset(self) -> None:
        """Called when the memory was cleared."""
        self._spread.clear()

    def _begin(self, row: int, tree: RowTree, first: int) -> _Spread:
        """A copy of what a row's tree holds in the slots before ``first``, which is the row's from now on."""
        held = self._spread.get(row)
        if held is not None and held.root != tree.root:  # left by an interrupt
            self.drop(row)
            held = None
        if held is not None and any(slot >= first for path in held.paths.values() for slot in path):
            self.cut(row, first, tree.upto(first))
            held = self._spread.get(row)
        if held is None:  # linear up to here, and in the row's own sequence
            own = _Spread(tree.root, {row: [*range(tree.root, first)]})
        else:
            own = _Spread(held.root, {one: [*path] for one, path in held.paths.items()})
        self._spread[row] = own
        return own

    def _free(self) -> list[int]:
        used = {one for own in self._spread.values() for one in own.paths}
        return [one for one in range(self._count - 1, self._rows - 1, -1) if one not in used]

    def _paths_of(self, row: int) -> list[int]:
        own = self._spread.get(row)
        return [] if own is None else [*own.paths]

    def _clear(self, row: int) -> None:
        self.drop(row)
        self._remove(row, 0)

    def _copy(self, source: int, sequence: int, end: int) -> None:
        self._llama.llama_memory_seq_cp(self._memory, source, sequence, 0, end)

    def _remove(self, sequence: int, start: int) -> None:
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise SprinterError("llama.cpp cannot forget the tokens of a tree")
