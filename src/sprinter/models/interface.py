"""The runner: one model, its cache, and what is done with it: extend, keep, rewind, copy, wipe.

A runner holds ``batch`` rows of tokens. It knows nothing of laws, drafts or rounds; who drives it decides which
tokens to feed and which to forget. Nothing in this interface is tied to one library's caches.

A row is linear (each token follows the one before it), or has a tree at its end. A token's *slot* is its place in the
row, in the order of reading; its *position*, which the model is given, is one more than that of the token that it
follows. In a tree a token sees the row's linear prefix, its ancestors in the tree and itself. A row has a tree from the
first ``extend`` with ``parents`` for it, were they a chain's, until ``keep``, until it is rewound to where the tree
begins or before, or until a chain is read on without ``parents``. Several calls may add to one tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["ModelOutput", "Runner"]


class ModelOutput(NamedTuple):
    """What a model said about the tokens that it was fed.

    Position i of a row belongs to token i of that row in the call: its logits are those of the *next* token.
    Positions at or beyond a row's count hold nothing meaningful.

    Attributes:
        logits: ``[batch, n, vocab]`` in the model's dtype; None where they were not asked for.
        hidden: ``[batch, n, d]``, the input of the output embedding (final norm applied). Of a prompt's own pass
            (``logits=False``, n > 1) a runner whose states are not free may leave them out: the axis is then shorter.
        layers: for each of ``hidden_layers``, in that order, what comes out of this decoder layer, ``[batch, n, d]``,
            the final norm not applied; of a prompt's own pass too.
    """

    logits: Tensor | None
    hidden: Tensor
    layers: tuple[Tensor, ...] = ()


@runtime_checkable
class Runner(Protocol):
    """Drives one model over ``batch`` rows of at most ``max_len`` tokens each.

    Attributes:
        name: the kind, for people ("row", "crop").
        batch: rows.
        max_len: the most tokens a row can hold.
        vocab_size: last axis of the logits (padded embedding rows included).
        hidden_size: d, last axis of the hidden states.
        device: where ``tokens`` are wanted.
        branches: whether ``extend`` takes parents that branch. Chains are taken by all runners.
    """

    name: str
    batch: int
    max_len: int
    vocab_size: int
    hidden_size: int
    device: torch.device
    branches: bool

    @property
    def lengths(self) -> list[int]:
        """Tokens held, one number a row (a fresh list)."""
        ...

    def extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        *,
        logits: bool = True,
        rows: Sequence[int] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        hidden_layers: Sequence[int] = (),
    ) -> ModelOutput:
        """Run the model over new tokens at the end of each row and keep them.

        Args:
            tokens: ``[batch, n]`` token ids, right-padded with any valid id; n >= 1.
            counts: real tokens of each row, 0..n; None means n for all. A row with count 0 is left as it was.
            logits: False for a prompt's own pass: the output embedding is skipped.
            rows: these rows alone, each once; ``tokens``, ``counts`` and the answer then have one entry for each of
                them, in this order. None: all rows.
            parents: of each row of the call, for each of its real tokens, the slot of the token that it follows: the
                last of the linear prefix (-1 where that is empty) or an earlier one of the row's tree, this call's
                included. None, for a row or for all: each follows the token in the slot before it, as in plain text.
                Parents that make no branch are read as plain text is.
            hidden_layers: decoder layers whose states are wanted, from 0, or from -1 for the last.

        Raises:
            ValueError: a wrong shape, count, parent or layer; a row that would exceed ``max_len``; branches where the
                runner takes none; a tree that is not read in one prefill chunk (512 tokens); no parents for a row whose
                tree branches.
            NotImplementedError: ``hidden_layers`` of a runner that cannot see them (llama.cpp).
        """
        ...

    def keep(self, row: int, path: Sequence[int]) -> None:
        """Of a row's tree keep the tokens on one path; the row is linear again, as if they had been read as plain text.

        The path's keys and values are moved next to the linear prefix; all other tokens of the tree are forgotten. An
        interrupt in the middle of the move leaves the row with its prefix alone.

        Args:
            row: which row.
            path: slots, each that of a child of the one before; the first follows the linear prefix. Empty: the prefix
                alone is kept.

        Raises:
            ValueError: a row that does not exist, or no such path in its tree.
        """
        ...

    def keys_values(self, layers: Sequence[int], row: int = 0) -> list[tuple[Tensor, Tensor]]:
        """Keys and values that a row holds in some layers, in the order of its slots; read only.

        Args:
            layers: from 0, or from -1 for the last.
            row: which row; rows differ in length, so it is one at a time.

        Returns:
            For each layer (keys, values), each ``[1, kv_heads, length, d]``: keys as they are cached (rotated). These
            are views of the cache, not copies: they mean something until the next call that changes the row.

        Raises:
            ValueError: a row or layer that does not exist, or a row that holds nothing yet.
            NotImplementedError: the runner has none to show (crop, llama.cpp, two rotary embeddings).
        """
        ...

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` slots of each row b, in constant time.

        In a tree the tokens that were read last are dropped; back where it begins the row is linear again.

        Raises:
            ValueError: a length that is negative or exceeds the present one.
        """
        ...

    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        """Make each of ``to_rows`` hold what ``from_row`` holds, its tree included.

        Raises:
            ValueError: a row that does not exist.
        """
        ...

    def wipe(self, row: int) -> None:
        """Let nothing that was once written beyond the row's length reach a later pass, were it NaN.

        A rewind lowers a length and may leave the numbers where they are. Masks give them a weight of 0, and 0 · NaN is
        NaN: after a pass that was not finite, or was broken off, they must go.

        Raises:
            ValueError: a row that does not exist.
        """
        ...
