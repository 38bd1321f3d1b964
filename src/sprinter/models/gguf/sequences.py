"""Trees in a llama.cpp context: a token of a tree belongs to the sequence of each path that runs through it.

A query of llama.cpp sees the cells of its sequence up to its own position. So each leaf of a tree has a sequence: the
cells of the prefix and of the leaf's path are marked as its own, whichever they share with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sprinter.errors import RowsError, SprinterError
from sprinter.models.runners.tree import RowTree

__all__ = ["MOST", "TreeSequences"]

MOST = 256  # LLAMA_MAX_SEQ


@dataclass(slots=True)
class _Spread:
    """Sequences of a row's tree.

    Attributes:
        root: length of the linear prefix.
        through: slot -> a sequence that runs through it; those that are missing are in the row's own.
        paths: sequence -> slots of the tree on its path.
    """

    root: int
    through: dict[int, int] = field(default_factory=dict)
    paths: dict[int, list[int]] = field(default_factory=dict)


class TreeSequences:
    """The sequences beside those of the rows, whose numbers are the rows'.

    Args:
        llama: the library. memory: of the context. rows: number of rows. count: of all sequences of the context.
    """

    def __init__(self, llama: Any, memory: Any, rows: int, count: int) -> None:
        self._llama, self._memory = llama, memory
        self._free = [*range(count - 1, rows - 1, -1)]
        self._rows: dict[int, _Spread] = {}

    def __contains__(self, row: int) -> bool:
        """Whether a row holds a tree that is spread over sequences."""
        return row in self._rows

    def state(self) -> dict[int, _Spread]:
        """For ``restore``."""
        return {**self._rows}

    def restore(self, before: dict[int, _Spread]) -> None:
        """Forget what was marked since, and what was read into it."""
        for row, own in [*self._rows.items()]:
            held = before.get(row)
            if own is not held:
                for sequence in own.paths.keys() - (held.paths.keys() if held else ()):
                    self._release(own, sequence)
        self._rows = before

    def mark(self, row: int, tree: RowTree, count: int) -> tuple[NDArray[np.int32], list[list[int]]]:
        """Positions of the last ``count`` tokens of a tree with branches, before they are read, and the sequences of
        each.

        Raises:
            RowsError: the context has too few sequences.
        """
        held = self._rows.get(row, _Spread(tree.root))
        own = self._rows[row] = _Spread(tree.root, {**held.through}, {**held.paths})
        depth: list[int] = []
        for parent in tree.parents:
            depth.append(0 if parent < tree.root else depth[parent - tree.root] + 1)
        first = tree.end - count
        parents = dict(enumerate(tree.parents[first - tree.root :], first))
        inner = set(parents.values())
        sequences: dict[int, list[int]] = {slot: [] for slot in parents}
        leaves = [slot for slot in parents if slot not in inner]
        if len(leaves) > len(self._free):
            raise RowsError(
                f"llama.cpp holds {MOST} sequences at a time, too few for trees of {len(leaves)} leaves in so many "
                "rows: use fewer rows, or smaller trees"
            )
        for leaf in leaves:
            new = [leaf]
            while (parent := parents[new[-1]]) >= first:
                new.append(parent)
            new.reverse()
            sequence = self._free.pop()
            base = own.through.get(parent, row)
            self._copy(
                base, sequence, tree.root + (0 if parent < tree.root else depth[parent - tree.root] + 1)
            )
            # slots of the row's own sequence are the first of the tree
            before = own.paths.get(base, [*range(tree.root, parent + 1)])
            own.paths[sequence] = [*(slot for slot in before if slot <= parent), *new]
            for slot in new:
                sequences[slot].append(sequence)
        own.through.update((slot, found[0]) for slot, found in sequences.items())
        return np.array([tree.root + depth[slot - tree.root] for slot in parents], np.int32), [
            *sequences.values()
        ]

    def cut(self, row: int, length: int, tree: RowTree | None) -> None:
        """Forget the slots of a row from ``length`` on; ``tree``: what is then left of its tree, if not linear text.

        If no branches are left, the rest is in the row's own sequence again.
        """
        own = self._rows.get(row)
        if own is None:
            return
        if tree is None or length <= own.root or not tree.branches:
            left = [*range(own.root, length)]
            self.straighten(row, left)
            return
        for sequence, path in [*own.paths.items()]:
            kept = [slot for slot in path if slot < length]
            self._remove(sequence, own.root + len(kept))
            own.paths[sequence] = kept
        own.through = {slot: one for slot, one in own.through.items() if slot < length}
        for sequence in {*own.paths} - {*own.through.values()}:
            self._release(own, sequence)

    def straighten(self, row: int, path: Sequence[int]) -> None:
        """Move a path of a row's tree into the row's own sequence, and forget the rest of the tree."""
        own = self._rows.pop(row)
        through = own.through.get(path[-1], row) if path else row
        self._remove(row, own.root if through != row else own.root + len(path))
        if through != row:
            span = own.root, own.root + len(path)
            self._llama.llama_memory_seq_cp(self._memory, through, row, *span)
        for sequence in [*own.paths]:
            self._release(own, sequence)

    def copy(self, from_row: int, row: int) -> None:
        """Give a row, which has its prefix, the sequences of another row's tree."""
        given = self._rows.get(from_row)
        if given is None:
            return
        if len(given.paths) > len(self._free):
            raise RowsError(
                f"llama.cpp holds {MOST} sequences at a time, too few for another tree: use fewer rows"
            )
        new = {sequence: self._free.pop() for sequence in given.paths}
        for sequence, other in new.items():
            self._copy(sequence, other, -1)
        self._rows[row] = _Spread(
            given.root,
            {slot: new[one] for slot, one in given.through.items()},
            {new[one]: [*path] for one, path in given.paths.items()},
        )

    def drop(self, row: int) -> None:
        """Forget all sequences of a row's tree."""
        own = self._rows.pop(row, None)
        for sequence in [] if own is None else [*own.paths]:
            assert own is not None
            self._release(own, sequence)

    def _release(self, own: _Spread, sequence: int) -> None:
        self._remove(sequence, 0)
        del own.paths[sequence]
        self._free.append(sequence)

    def _copy(self, source: int, sequence: int, end: int) -> None:
        self._llama.llama_memory_seq_cp(self._memory, source, sequence, 0, end)

    def _remove(self, sequence: int, start: int) -> None:
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise SprinterError("llama.cpp cannot forget the tokens of a tree")
