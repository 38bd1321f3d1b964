"""The runner: one model, its cache, and four verbs: extend, rewind, copy, wipe.

A runner holds ``batch`` rows of tokens. It knows nothing of laws, drafts or rounds; who drives it decides which
tokens to feed and which to forget. Nothing in this interface is tied to one library's caches.
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
    """

    logits: Tensor | None
    hidden: Tensor


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
    """

    name: str
    batch: int
    max_len: int
    vocab_size: int
    hidden_size: int
    device: torch.device

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
    ) -> ModelOutput:
        """Run the model over new tokens at the end of each row and keep them.

        Args:
            tokens: ``[batch, n]`` token ids, right-padded with any valid id; n >= 1.
            counts: real tokens of each row, 0..n; None means n for all. A row with count 0 is left as it was.
            logits: False for a prompt's own pass: the output embedding is skipped.
            rows: these rows alone, each once; ``tokens``, ``counts`` and the answer then have one entry for each of
                them, in this order. None: all rows.

        Raises:
            ValueError: a wrong shape or count, or a row that would exceed ``max_len``.
        """
        ...

    def rewind(self, lengths: Sequence[int]) -> None:
        """Forget all but the first ``lengths[b]`` tokens of each row b, in constant time.

        Raises:
            ValueError: a length that is negative or exceeds the present one.
        """
        ...

    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        """Make each of ``to_rows`` hold what ``from_row`` holds.

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
