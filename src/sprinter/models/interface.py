"""The runner interface: one model and its KV cache, with the operations extend, commit_path, rewind, copy and wipe.

A runner holds ``batch`` rows of tokens. It knows nothing of laws, drafts or rounds: the caller decides which tokens to
feed and which to forget. Nothing in this interface is tied to one library's caches.

A row is linear (each token follows the one before it) or ends in a tree. A token's *slot* is its index in the row, in
the order of reading; its *position*, which the model is given, is one more than that of the token that it follows. In a
tree a token sees the row's linear prefix, its ancestors in the tree and itself. The first ``extend`` with ``parents``
for a row starts a tree, even if the parents form a chain. The tree ends with ``commit_path``, with a rewind to its
first slot or earlier, or when an unbranched tree is extended without ``parents``. Several calls may add to one tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

__all__ = ["ModelOutput", "Runner", "ServedModel"]


class ModelOutput(NamedTuple):
    """Output of a forward pass over new tokens.

    Position i of a row belongs to token i of that row in the call: its logits are those of the *next* token.
    Positions at or beyond a row's count are undefined.

    Attributes:
        logits: ``[batch, n, vocab]`` in the model's dtype; None if they were not requested.
        hidden: ``[batch, n, d]``, the input of the output embedding (final norm applied). In prefill
            (``logits=False``, n > 1) a runner for which states cost extra may omit them: the axis is then shorter.
        layers: for each of ``hidden_layers``, in that order, the output of this decoder layer, ``[batch, n, d]``,
            without the final norm; in prefill too.
        spent: of a target on a server, what each row has asked of it (``Stats.remote``); else empty.
    """

    logits: Tensor | None
    hidden: Tensor
    layers: tuple[Tensor, ...] = ()
    spent: Sequence[Mapping[str, int]] = ()


class Runner(ABC):
    """Drives one model over ``batch`` rows of at most ``max_len`` tokens each.

    Attributes:
        name: the kind of runner, for messages ("row", "crop").
        batch: number of rows.
        max_len: maximum number of tokens in a row.
        vocab_size: last axis of the logits (padded embedding rows included).
        hidden_size: d, last axis of the hidden states.
        device: the device on which ``tokens`` are expected.
        branches: whether ``extend`` accepts parents that branch. All runners accept chains.
        leaves: largest number of leaves of a tree in a row; None: any number.
        may_hold_nan: whether NaN may be left in memory that belongs to no row, until all rows are empty.
    """

    name: str
    batch: int
    max_len: int
    vocab_size: int
    hidden_size: int
    device: torch.device
    branches = False
    leaves: int | None = None
    may_hold_nan = False

    @property
    @abstractmethod
    def lengths(self) -> list[int]:
        """Number of tokens in each row (a new list)."""

    @property
    @abstractmethod
    def cache_bytes(self) -> int:
        """Memory of the KV cache in bytes, as far as it is allocated."""

    @abstractmethod
    def extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None = None,
        *,
        logits: bool = True,
        rows: Sequence[int] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        hidden_layers: Sequence[int] = (),
        line: bool = False,
    ) -> ModelOutput:
        """Run the model over new tokens at the end of each row and keep them.

        Args:
            tokens: ``[batch, n]`` token ids, right-padded with any valid id; n >= 1.
            counts: number of real tokens in each row, 0..n; None means n for all. A row with count 0 is unchanged.
            logits: False in prefill: the output embedding is skipped.
            rows: only these rows, each at most once; ``tokens``, ``counts`` and the output then have one entry per
                row, in this order. None: all rows.
            parents: for each row of the call, the slot that each of its real tokens follows: the last slot of the
                linear prefix (-1 if that is empty) or an earlier slot of the row's tree, this call's included. None,
                for a row or for all: each token follows the slot before it, as in plain text. Parents without a
                branch are read as plain text.
            hidden_layers: decoder layers whose states are returned, counted from 0, or from -1 for the last.
            line: logits may be given without padding, ``[tokens, vocab]``, those of one row after another's.

        Raises:
            ValueError: a wrong shape, count, parent or layer; a row that would exceed ``max_len``; branches if the
                runner supports none; branching tokens that exceed one prefill chunk (512 tokens); no parents for a row
                whose tree branches.
            NotImplementedError: ``hidden_layers`` on a runner that returns no states: a ``ServedModel``, or a family
                whose decoder layers are not found.
        """

    @abstractmethod
    def commit_path(self, row: int, path: Sequence[int]) -> None:
        """Keep one path of a row's tree. The row is linear again, as if the path had been read as plain text.

        The path's keys and values are moved next to the linear prefix; all other tokens of the tree are forgotten. If
        the move is interrupted, the row holds only its prefix.

        Args:
            row: number of the row.
            path: slots, each a child of the one before; the first follows the linear prefix. Empty: only the prefix is
                kept.

        Raises:
            ValueError: the row does not exist, or its tree has no such path.
        """

    @abstractmethod
    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` slots of each row b, in constant time.

        In a tree the tokens that were read last are dropped; a row that is rewound to the tree's first slot is linear
        again.

        Raises:
            ValueError: a length is negative or exceeds the present one.
        """

    @abstractmethod
    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """Copy the contents of ``from_row``, its tree included, to each of ``to_rows``.

        Args:
            from_row, to_rows: numbers of rows.
            length: number of leading slots to copy; None: all.

        Raises:
            ValueError: a row does not exist, or has fewer slots.
        """

    @abstractmethod
    def adopt(self, other: Runner, length: int) -> bool:
        """Copy the first ``length`` slots of row 0 of another runner of the same model to row 0, which is empty.

        Returns:
            False if the runners are of different kinds; then nothing was done.
        """

    @abstractmethod
    def wipe(self, row: int) -> None:
        """Clear everything beyond the row's length, so that no NaN there reaches a later forward pass.

        A rewind lowers a length and may leave the values in the buffers. Masks give them a weight of 0, but 0 · NaN is
        NaN: after a forward pass that was interrupted or gave NaN they must be cleared.

        Raises:
            ValueError: the row does not exist.
        """


class ServedModel(ABC):
    """A model that something else than transformers runs: what the engine must know of it, and rows to run it in.

    A new backend is a subclass of this and a ``Runner``, in one file; ``load_pair`` takes such a model as it takes a
    transformers model in memory.

    Attributes:
        name: for messages. runner: kind of its runner, "llamacpp". reason: how it runs, in words.
        config: its sizes under transformers' names, for FLOPs.
        vocab_size, hidden_size: last axes of its logits and hidden states. context: longest text in tokens.
        eos_ids: token ids that end a text.
        device, dtype: of its runners' inputs and outputs. on_gpu: whether it is computed on a GPU.
        weights: storage type of its weights, for records. size: number of parameters.
        token_bytes: of one token's keys and values in all layers.
        fingerprint: of its weights, by which gates and heads know it.
        exactness: as ``choose.exactness``.
    """

    name: str
    runner: str
    reason: str
    config: PreTrainedConfig
    vocab_size: int
    hidden_size: int
    context: int
    eos_ids: tuple[int, ...]
    device = torch.device("cpu")
    dtype = torch.float32
    on_gpu = False
    weights: str
    size: int
    token_bytes: int
    fingerprint: str
    exactness = "up to rounding"

    def most_leaves(self, rows: int) -> int | None:
        """Largest number of leaves of a tree in each of so many rows; None: any number. A chain has one."""
        return None

    @abstractmethod
    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """A runner of ``batch`` rows of ``max_len`` tokens, for trees of up to so many leaves in each.

        Raises:
            UserError: it cannot serve as many.
        """
