"""What the rows of a KV cache hold, and how much of it another text may reuse.

Prefill is split at the multiples of ``BLOCK`` tokens, counted from the beginning of the text, whether anything is
reused or not. So a block of a prompt is computed in the same shapes in every request, and its keys and values are the
same to the last bit: reuse "exact" takes such blocks alone. Keys and values of generated tokens come from forward
passes over few tokens, and differ from those of prefill in the last bits; reuse "all" takes them too. Where a token is
the same in every forward pass (our own kernels), "exact" takes whatever was read one after the other, token by token;
of trees' nodes, whose sums run over other slots, only "all" makes use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sprinter.decode.checks import at_least
from sprinter.decode.sequence import common_prefix
from sprinter.errors import UserError

__all__ = [
    "BLOCK",
    "DEFAULT",
    "OFF",
    "HeldRows",
    "HeldText",
    "PrefixCache",
    "up_to_boundary",
]

BLOCK = 128
"""Prefill is split at multiples of this number of tokens."""

_KINDS = ("exact", "all")


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """How much of the texts that were read is kept for later ones.

    Attributes:
        max_bytes: maximum size of idle KV caches, of both models together; 0: nothing is reused.
        reuse: "exact": that with which every text is the same to the bit: whole blocks of prompts, or where our own
            kernels run all layers every token that was read in a chain; "all": generated tokens always, which changes
            last bits of floating-point numbers, and rarely a token.

    Raises:
        UserError: an invalid value.
    """

    max_bytes: int = 1 << 31
    reuse: str = "exact"

    def __post_init__(self) -> None:
        at_least("prefix_cache_bytes", self.max_bytes, 0)
        if self.reuse not in _KINDS:
            raise UserError(f"prefix_reuse={self.reuse!r} is unknown: use {' or '.join(map(repr, _KINDS))}")


OFF, DEFAULT = PrefixCache(0), PrefixCache()


class HeldText:
    """The tokens in one row that other texts may reuse: the prompt while its text is written, then all of it.

    Attributes:
        tokens: token ids. The row may have more than is recorded here, never less.
        checked: number of leading tokens whose keys and values are known to be finite.
        blocks: number of leading tokens that were read by prefill, or in any way but as a tree if the model is steady.
        owner: of the request that they were read for; texts of other owners reuse none of them.

    Args:
        steady: whether a token is the same in every forward pass of the model.
    """

    __slots__ = ("_steady", "blocks", "checked", "owner", "tokens")

    def __init__(self, steady: bool = False) -> None:
        self._steady = steady
        self.tokens: list[int] = []
        self.checked = self.blocks = 0
        self.owner = ""

    def cut(self, length: int) -> None:
        """Forget all but the first ``length`` slots."""
        self.checked, self.blocks = min(self.checked, length), min(self.blocks, length)
        del self.tokens[length:]

    def add(self, start: int, tokens: Sequence[int], *, finite: bool) -> None:
        """Record prefill of ``tokens`` after the first ``start`` slots; ``finite``: whether their states are."""
        self.cut(start)
        if len(self.tokens) < start:
            return  # the slots before were not recorded, after an interrupt
        self.tokens += tokens
        if self.blocks == start:
            self.blocks = len(self.tokens)
        if finite and self.checked == start:
            self.checked = len(self.tokens)

    def end(self, tokens: list[int], chained: int | None) -> None:
        """Record the whole text that the row holds, of finite keys and values; ``chained``: as in ``ReadState``."""
        self.tokens = tokens
        self.checked = len(tokens)
        if self._steady:
            self.blocks = self.checked if chained is None else min(self.checked, chained)
        else:
            self.blocks = min(self.blocks, self.checked)

    def take(self, other: HeldText, length: int) -> None:
        """Record a copy of the first tokens of another row."""
        self.cut(0)
        self.tokens, self.owner = other.tokens[:length], other.owner
        self.checked, self.blocks = min(other.checked, length), min(other.blocks, length)

    def usable(self, reuse: str) -> int:
        """Number of leading tokens that another text may reuse."""
        return self.checked if reuse == "all" else self.whole(min(self.checked, self.blocks))

    def whole(self, length: int) -> int:
        """Of the first ``length`` tokens those that are the same whatever comes after them."""
        return length if self._steady else length // BLOCK * BLOCK


class HeldRows:
    """The texts in the rows of one runner.

    Args:
        rows: number of rows.
        cache: what is kept and reused.
        steady: whether a token is the same in every forward pass of the runner's model.
    """

    def __init__(self, rows: int, cache: PrefixCache = OFF, steady: bool = False) -> None:
        self.texts = [HeldText(steady) for _ in range(rows)]
        self.cache = cache

    @property
    def on(self) -> bool:
        """Whether anything is reused."""
        return self.cache.max_bytes > 0

    @property
    def empty(self) -> bool:
        """Whether no row holds anything that may be reused."""
        return not any(text.usable(self.cache.reuse) for text in self.texts)

    def shared(self, row: int, prefix: Sequence[int], owner: str = "") -> int:
        """Number of tokens at the beginning of ``prefix`` that a row holds and that a text of this owner may reuse."""
        text, reuse = self.texts[row], self.cache.reuse
        if not self.on or text.owner != owner:
            return 0
        length = len(prefix)
        if text.blocks == length <= text.checked and text.tokens[:length] == prefix:
            return length  # the same prompt, whose last block is as long, while its text is written
        usable = text.usable(reuse)
        if not usable:
            return 0
        length = common_prefix(text.tokens[:usable], prefix)
        return length if reuse == "all" else text.whole(length)

    def continues(self, row: int, prefix: Sequence[int], owner: str = "") -> bool:
        """Whether ``prefix`` begins with all that a row holds for reuse, so that nothing is lost in that row."""
        return self.shared(row, prefix, owner) == self.texts[row].usable(self.cache.reuse)


def up_to_boundary(start: int) -> int:
    """Number of tokens from a position to the next multiple of ``BLOCK``."""
    return BLOCK - start % BLOCK
