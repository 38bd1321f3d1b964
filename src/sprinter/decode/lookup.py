"""Prompt lookup: copies what followed an earlier occurrence of the text's ending, as much as is expected to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sprinter.decode.checks import count, number
from sprinter.decode.copies import FREE, LONGEST_COPY, NO_COPY, Copier, Copies, Copy, Worth
from sprinter.decode.costs import MEASURED, STEP
from sprinter.decode.drafter import NOTHING, Context, Drafter
from sprinter.decode.registry import DRAFTER
from sprinter.errors import UserError

__all__ = ["Endings", "Lookup"]


@DRAFTER.rule("lookup")
@dataclass(frozen=True)
class Lookup(Copies):
    """Prompt lookup: copies the tokens that followed the latest earlier occurrence of the text's last tokens.

    The law of a copied token is one-hot, so every accept rule works; no model runs for it.

    With costs of target passes, a round copies as many tokens as are expected to pay: a token's chance depends on how
    long an ending stood before, and is learned from what became of earlier copies; it is worth what a token costs
    otherwise. Where the draft model is expected to gain more, or nothing pays, nothing is copied.

    Args:
        n: longest ending to search for, tokens; shorter ones down to ``least`` are tried in turn.
        least: shortest ending, tokens.
        otherwise, length, reads, step: as for ``Copies``; stop rule and cap may end a run sooner.
    """

    n: int = count(3)
    least: int = count(2)
    otherwise: Drafter = NOTHING
    length: int = count(LONGEST_COPY, 1, LONGEST_COPY)
    reads: str = FREE
    step: float | str = number(STEP, 0.0, 100.0, MEASURED)

    def __post_init__(self) -> None:
        Copies.__post_init__(self)
        if self.least > self.n:
            raise UserError(f"least={self.least} is out of range: give at most n={self.n}")

    def copier(self) -> Copier:
        """What looks endings up in a text."""
        return _LookupCopier(self)


class _LookupCopier(Copier):
    def __init__(self, drafter: Lookup) -> None:
        self._drafter, self._worth = drafter, Worth.of(drafter)

    def plan(self, context: Context) -> Copy:
        drafter, worth, text = self._drafter, self._worth, context.text
        if worth is not None:
            worth.learn(text)
        if (found := _find(text, drafter.n, drafter.least)) is None:
            return NO_COPY
        if worth is None:
            return Copy(_copy(text, found.source, drafter.length))
        length, gain = worth.paying(found.size, drafter.length)
        copied = _copy(text, found.source, length)
        worth.copied = (len(text), copied, found.size)
        return Copy(copied, None, gain)


class _Earlier(NamedTuple):
    source: int  # where the copy begins
    size: int  # of the ending that stood before it


def _find(text: Sequence[int], n: int, least: int) -> _Earlier | None:
    """The latest earlier occurrence of the longest ending of at most n tokens that has one."""
    if not text:
        return None
    ids = np.asarray(text)
    ends, size = np.flatnonzero(ids[:-1] == ids[-1]), 1
    while len(ends) and size < n:
        longer = ends[ends >= size]
        longer = longer[ids[longer - size] == ids[-1 - size]]
        if not len(longer):
            break
        ends, size = longer, size + 1
    return _Earlier(int(ends[-1]) + 1, size) if len(ends) and size >= least else None


def _copy(text: Sequence[int], source: int, length: int) -> list[int]:
    """The tokens from ``source`` on; the copy may overlap its source, so that a short cycle repeats."""
    found: list[int] = []
    for at in range(source, source + length):
        found.append(int(text[at]) if at < len(text) else found[at - len(text)])
    return found


class Endings:
    """Where a text that only grows has stood before: what a round looks up does not depend on its length.

    Args:
        n, least: as for ``Lookup``. searched: number of a prompt's last tokens that are read.
    """

    def __init__(self, n: int, least: int, searched: int) -> None:
        self._sizes, self._searched = range(least, n + 1), searched
        self._last: dict[tuple[int, ...], int] = {}  # where each ending stood last
        self._read = 0

    def look_up(self, text: Sequence[int], at_most: int) -> list[int]:
        """Tokens that followed the latest earlier occurrence of the text's last tokens; [] if there is none."""
        first = 0 if self._read else max(0, len(text) - self._searched)
        for end in range(max(self._read, first) + 1, len(text)):
            for size in self._sizes:
                if end - size >= first:
                    self._last[tuple(text[end - size : end])] = end
        self._read = max(self._read, len(text) - 1)
        for size in reversed(self._sizes):
            source = self._last.get(tuple(text[-size:])) if len(text) > size else None
            if source is not None:
                return _copy(text, source, at_most)
        return []
