"""Trees at the end of a row: the parent of each token, and the tokens that it sees.

A row is a linear prefix, optionally followed by a tree: every token of the tree follows the end of the prefix or an
earlier token of the tree. *Slots* number the tokens in the order in which they were read; the *position* of a token,
which the model is given, is the number of tokens before it on its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["NOWHERE", "RowTree", "tree_places"]

NOWHERE = 2**31 - 1
"""Position of a key that a query must not see: beyond every query."""


@dataclass(frozen=True, slots=True)
class RowTree:
    """The tree of one row.

    Attributes:
        root: length of the row's linear prefix, which is also the tree's first slot.
        parents: for each token of the tree, in the order of the slots, the slot of the token that it follows;
            ``root - 1`` is the end of the prefix.
    """

    root: int
    parents: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Number of slots of the row, prefix included."""
        return self.root + len(self.parents)

    @property
    def branches(self) -> bool:
        """Whether some token does not follow the slot before it."""
        return self.parents != tuple(range(self.root - 1, self.end - 1))

    def grown(self, parents: Sequence[int]) -> RowTree:
        """The tree with new tokens at the next slots.

        Raises:
            ValueError: a parent is neither the end of the prefix nor an earlier token of the tree.
        """
        for slot, parent in enumerate(parents, self.end):
            if not self.root - 1 <= parent < slot:
                raise ValueError(
                    f"the token at slot {slot} cannot follow slot {parent}: use {self.root - 1} (the end of the "
                    f"linear prefix) or an earlier slot of the tree, at most {slot - 1}"
                )
        return RowTree(self.root, (*self.parents, *parents))

    def chained(self, count: int) -> RowTree:
        """The tree with ``count`` more tokens, each following the slot before it."""
        return RowTree(self.root, (*self.parents, *range(self.end - 1, self.end - 1 + count)))

    def upto(self, length: int) -> RowTree | None:
        """The part of the tree in the row's first ``length`` slots; None if the row is linear up to there."""
        return RowTree(self.root, self.parents[: length - self.root]) if length > self.root else None

    def check_path(self, path: Sequence[int]) -> None:
        """Check that each slot of a path is a child of the one before, starting at the end of the prefix.

        Raises:
            ValueError: a slot is outside the tree, or not a child of the one before.
        """
        if path and not self.parents:
            raise ValueError(f"path={list(path)}: the row has no tree, so that only [] can be kept")
        before = self.root - 1
        for slot in path:
            if not self.root <= slot < self.end:
                raise ValueError(
                    f"path={list(path)}: slot {slot} is not one of the tree's, {self.root} to {self.end - 1}"
                )
            if self.parents[slot - self.root] != before:
                raise ValueError(
                    f"path={list(path)}: slot {slot} follows slot {self.parents[slot - self.root]}, not {before}"
                )
            before = slot

    def seen(self) -> NDArray[np.int64]:
        """``[tokens, tokens]``: the position of the column's token if the row's token sees it, else ``NOWHERE``."""
        size = len(self.parents)
        seen = np.full((size, size), NOWHERE)
        for node, parent in enumerate(self.parents):
            position = self.root
            if parent >= self.root:
                seen[node] = seen[parent - self.root]
                position = seen[node, parent - self.root] + 1
            seen[node, node] = position
        return seen


def tree_places(
    trees: Sequence[RowTree], counts: Sequence[int], n: int, spare: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions and slots ``[rows, n]`` and visible keys ``[rows, n, k]`` (see ``row.RowPlaces``) for reading the last
    ``counts[i]`` tokens of each tree.

    Args:
        trees: one per row, the new tokens included; at least one has a token.
        counts: number of new tokens in each row.
        n: tokens per row of the forward pass, padding included.
        spare: the slot of padding, which has position 0 and sees the row's first key.
        device: device of the tensors.
    """
    rows, width = len(trees), max(len(tree.parents) for tree in trees)
    places = np.zeros((2, rows, n), np.int64)
    places[1] = spare
    blocks = np.full((rows, n, width), NOWHERE)
    for i, (tree, count) in enumerate(zip(trees, counts, strict=True)):
        size, seen = len(tree.parents), tree.seen()
        places[0, i, :count] = seen.diagonal()[size - count :]
        places[1, i, :count] = range(tree.end - count, tree.end)
        blocks[i, :count, :size] = seen[size - count :]
        if tree.root == 0:
            blocks[i, count:, 0] = 0  # a query that sees no key at all gives NaN
    positions, slots = torch.from_numpy(places).to(device)
    roots = torch.tensor([tree.root for tree in trees], device=device)[:, None, None]
    most = max(tree.end for tree in trees)
    key = torch.arange(int(max(tree.root for tree in trees)) + width, device=device)
    keys = key.where(key < roots, NOWHERE).repeat(1, n, 1)
    at = (roots + torch.arange(width, device=device)).expand(rows, n, width)
    keys.scatter_(2, at, torch.from_numpy(blocks).to(device))
    return positions, slots, keys[:, :, :most].contiguous()
