"""Where the ending of a text stood before: the latest tokens of one or more texts, found by their suffixes.

A suffix tree is kept without its nodes. The tokens stand in a ring; of each, the position at which the same 2, 4, 8 and
16 tokens ended before stands in a chain behind a hash table, as in LZ77 (RFC 1951, section 4). Of an ending, the chains
name its latest occurrences, longest gram first. The occurrences of a pattern are the leaves below its node, so that
counts of what followed them are the node's frequencies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

__all__ = ["END", "LEAST", "Occurrences", "SuffixIndex", "TextIndex"]

_SIZES = np.array((16, 8, 4, 2))
LEAST = int(_SIZES[-1])
"""Shortest ending that is found, tokens."""
_OWN_SIZES = (8, 2)
_TAIL = int(_SIZES[0]) - 1
END = -1
"""Stands behind each text."""
_FIRST = 1 << 10  # tokens for which there is room at first
_CHUNK = 1 << 15  # tokens that are hashed at once
_MOST_TOKENS = 2**31 - 1  # positions have 32 bits
_BASE, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9  # odd


class Occurrences(NamedTuple):
    """Where an ending stood before, longest match first, of equal ones the latest.

    Attributes:
        sizes: number of tokens of the ending that stood there.
        rows: the tokens that followed, padded with -1 behind the end of a text.
    """

    sizes: list[int]
    rows: list[list[int]]


class SuffixIndex:
    """The latest tokens of texts, and where each ending stood among them.

    A token costs the same whatever stands before it: 36 bytes, and the same number of steps.

    Args:
        window: number of tokens that are kept; older ones make room. At least 1.
        depth: longest match that is distinguished, tokens.
        most: number of occurrences that are looked at.
    """

    def __init__(self, window: int, depth: int = 64, most: int = 64) -> None:
        self.window, self._depth, self._most = window, depth, most
        self.clear()

    def clear(self) -> None:
        """Forget all texts."""
        self._end = 0
        self._allocate(min(self.window, _FIRST))

    def __len__(self) -> int:
        """Number of tokens that are kept, with one behind each text."""
        return min(self._end, len(self._tokens))

    @property
    def nbytes(self) -> int:
        """Size of all tables."""
        return self._tokens.nbytes + self._heads.nbytes + self._before.nbytes

    def tokens(self) -> np.ndarray:
        """The tokens that are kept, oldest first, with -1 behind each text."""
        return self._tokens[np.arange(self._end - len(self), self._end) % len(self._tokens)]

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Append tokens to the text that is being written; ``END`` ends it: no match goes across."""
        given = np.asarray(tokens, np.int32)[-self.window :]
        if self._end + len(given) > _MOST_TOKENS:
            self.clear()
        room = len(self._tokens)
        if self._end + len(given) > room and room < self.window:
            kept = self.tokens()
            while room < self._end + len(given) and room < self.window:
                room = min(self.window, 2 * room)
            self._allocate(room)
            self._end, given = 0, np.concatenate([kept, given])[-self.window :]
        for first in range(0, len(given), _CHUNK):
            self._add(given[first : first + _CHUNK])

    def find(self, ending: Sequence[int], length: int) -> Occurrences | None:
        """The latest occurrences of an ending, and up to ``length`` tokens that followed each.

        Args:
            ending: the last tokens of a text; as many are compared as ``depth`` says.

        Returns:
            None: nothing of ``LEAST`` tokens or more stood before.
        """
        asked = np.asarray(ending[-self._depth :], np.int32)[::-1]
        first, room = self._end - len(self), len(self._tokens)
        if len(asked) < LEAST or not len(self):
            return None
        places = self._places(asked)
        if not places:
            return None
        at = np.fromiter(places, np.int64, len(places))
        back = at[:, None] - np.arange(len(asked))
        differs = (self._tokens[back % room] != asked) | (back < first)
        sizes = np.where(differs.any(1), differs.argmax(1), len(asked))
        order = np.lexsort((-at, -sizes))
        order = order[: np.count_nonzero(sizes >= LEAST)]
        if not len(order):
            return None
        at, steps = at[order], np.arange(length)
        ahead = at[:, None] + 1 + steps
        rows = np.where(ahead < self._end, self._tokens[ahead % room], END)
        rows[(rows == END).cumsum(1) > 0] = END  # what stands behind the end of a text is another one
        return Occurrences(sizes[order].tolist(), rows.tolist())

    def _places(self, asked: np.ndarray) -> dict[int, None]:
        """Positions at which the last token of an ending may stand again; ``asked``: reversed."""
        places: dict[int, None] = {}
        first, room, heads, earlier = self._end - len(self), len(self._tokens), self._head_of, self._before_of
        keys = self._keys(asked[: _TAIL + 1][::-1])[:, -1].tolist()
        for row, (size, key) in enumerate(zip(_SIZES.tolist(), keys, strict=True)):
            at, tried = heads[key] if size <= len(asked) else -1, 0
            while at >= first and tried < self._most:
                places[at] = None
                at, tried = earlier[row * room + at % room], tried + 1
            if len(places) >= self._most:
                break
        return places

    def _allocate(self, room: int) -> None:
        bits = max(1, (room - 1).bit_length())
        self._shift, self._slots = np.uint64(64 - bits), 1 << bits
        self._tokens = np.full(room, END, np.int32)
        self._heads = np.full(len(_SIZES) * self._slots, -1, np.int32)
        self._before = np.full(len(_SIZES) * room, -1, np.int32)
        self._head_of, self._before_of = self._heads.data, self._before.data

    def _keys(self, tokens: np.ndarray) -> np.ndarray:
        """The places in the table of heads of the grams that end at each token, ``[sizes, n]``."""
        n = len(tokens)
        powers, inverses = _powers(_CHUNK + _TAIL)
        sums = np.concatenate(
            [[np.uint64(0)], np.cumsum((tokens.astype(np.int64) + 2).view(np.uint64) * powers[:n])]
        )
        starts = np.maximum(np.arange(1, n + 1) - _SIZES[:, None], 0)
        grams = (sums[1:] - sums[starts]) * inverses[:n] * np.uint64(_MIX)
        slots: np.ndarray = (grams >> self._shift).astype(np.int64)
        return slots + np.arange(len(_SIZES))[:, None] * self._slots

    def _add(self, tokens: np.ndarray) -> None:
        n, end, room = len(tokens), self._end, len(self._tokens)
        tail = self._tokens[np.arange(max(0, end - min(_TAIL, room)), end) % room]
        keys = self._keys(np.concatenate([tail, tokens]))[:, len(tail) :].ravel()
        at = np.arange(end, end + n)
        self._tokens[at % room] = tokens
        order = keys.argsort(kind="stable")  # of equal keys the earlier position first
        keys, at = keys[order], np.tile(at, len(_SIZES))[order]
        again = keys[1:] == keys[:-1]
        before = self._heads[keys]
        before[1:][again] = at[:-1][again]
        self._before[order // n * room + at % room] = before
        last = np.append(~again, True)
        self._heads[keys[last]] = at[last]
        self._end = end + n


class TextIndex:
    """A text as it is written, and where its ending stood in it. Arrays cost more than they save where a few tokens are
    added at a time.

    Args:
        depth, most: as for ``SuffixIndex``.
    """

    def __init__(self, depth: int = 64, most: int = 64) -> None:
        self._depth, self._most = depth, most
        self._tokens: list[int] = []
        # By size of a gram: where each ended last, and of each token where the gram that it ends stood before.
        self._grams = [(size, dict[int, int](), list[int]()) for size in _OWN_SIZES]

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        text = self._tokens
        for token in tokens:
            at = len(text)
            text.append(token)
            for size, last, before in self._grams:
                gram = hash(tuple(text[max(0, at + 1 - size) :]))
                before.append(last.get(gram, -1))
                last[gram] = at

    def find(self, length: int) -> Occurrences | None:
        """The latest earlier occurrences of its ending, and ``length`` tokens that followed each: what follows goes on
        into itself, so that a short cycle repeats. None: nothing of ``LEAST`` tokens or more stood before."""
        text, places, found = self._tokens, dict[int, None](), list[tuple[int, int]]()
        for _, _, before in self._grams:
            at, tried = before[-1] if text else -1, 0
            while at >= 0 and tried < self._most:
                places[at] = None
                at, tried = before[at], tried + 1
            if len(places) >= self._most:
                break
        for at in places:
            size, longest, behind = 0, min(self._depth, at + 1), len(text) - 1 - at
            while size < longest and text[at - size] == text[at + behind - size]:
                size += 1
            if size >= LEAST:
                found.append((size, at))
        if not found:
            return None
        found.sort(reverse=True)
        rows = [text[at + 1 : at + 1 + length] for _, at in found]
        return Occurrences(
            [size for size, _ in found], [(row * (length // len(row) + 1))[:length] for row in rows]
        )


@cache
def _powers(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Powers of the base and of its inverse, modulo 2^64: a gram's hash does not depend on where it stands."""
    both = [np.full(n, base % 2**64, np.uint64) for base in (_BASE, pow(_BASE, -1, 2**64))]
    for one in both:
        one[0] = 1
    return np.cumprod(both[0]), np.cumprod(both[1])
