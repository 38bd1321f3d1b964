"""Diversity and repetition of a text, computed from its token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

__all__ = ["distinct", "longest_repeat", "repeated"]


def distinct(ids: Sequence[int], n: int) -> float | None:
    """Distinct n-grams over all n-grams (Li et al. 2016, distinct-n), in (0, 1]; None: shorter than n."""
    grams = len(ids) - n + 1
    return None if grams < 1 else _different(ids, n) / grams


def repeated(ids: Sequence[int], n: int = 4) -> float | None:
    """Share of n-grams that occurred in the text before (Welleck et al. 2020, seq-rep-n), in [0, 1)."""
    share = distinct(ids, n)
    return None if share is None else 1 - share


def longest_repeat(ids: Sequence[int]) -> int:
    """Length of the longest run of tokens that occurs in the text twice, possibly overlapping; 0: no token repeats."""
    low, high = 0, max(len(ids) - 1, 0)
    while low < high:  # a repeated run of length n contains repeated runs of all smaller lengths
        middle = (low + high + 1) // 2
        if _different(ids, middle) < len(ids) - middle + 1:
            low = middle
        else:
            high = middle - 1
    return low


def _different(ids: Sequence[int], n: int) -> int:
    """Number of different n-grams, counted by hash, so that long ones need little memory."""
    data = memoryview(array("q", ids).tobytes())
    return len({hash(bytes(data[8 * at : 8 * (at + n)])) for at in range(len(ids) - n + 1)})
