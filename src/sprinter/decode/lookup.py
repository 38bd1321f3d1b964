"""Prompt lookup: copies what followed an earlier occurrence of the text's ending, as much as is expected to pay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np

from sprinter.decode.checks import Parameters, choice, count, number
from sprinter.decode.costs import MEASURED, READS, STEP
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.decode.registry import DRAFTER
from sprinter.errors import UserError

__all__ = ["LONGEST_COPY", "Lookup", "look_up"]

LONGEST_COPY = 511
"""Largest number of tokens that ``Lookup`` copies in a round."""

_FREE = "free"
_READS = "1.03x1.1x1.2x1.5"  # where none were measured
# Of a copied token behind an ending of 1, 2, ... tokens that stood before: its chance, which so many verdicts count
# for. Answers of a 1.5 B model to code, maths, prose and chat (docs/decisions/0055-copies-that-pay.md).
_CHANCES, _WEIGHT = (0.25, 0.5, 0.6, 0.68, 0.75, 0.8, 0.85, 0.92), 6.0
# What a token of the draft model costs, in plain tokens, and its chance: following both through a text gains nothing.
_PRICE, _DRAFTED = 0.7, 0.8
_ROUND = 8  # draft tokens of a round, at most, in the comparison with the draft model


@DRAFTER.rule("lookup")
@dataclass(frozen=True)
class Lookup(Drafter):
    """Prompt lookup: copies the tokens that followed the latest earlier occurrence of the text's last tokens.

    The law of a copied token is one-hot, so every accept rule works; no model runs for it.

    With costs of target passes, a round copies as many tokens as are expected to pay: a token's chance depends on how
    long an ending stood before, and is learned from what became of earlier copies; it is worth what a token costs
    otherwise. Where the draft model is expected to gain more, or nothing pays, nothing is copied.

    Args:
        n: longest ending to search for, tokens; shorter ones down to ``least`` are tried in turn.
        least: shortest ending, tokens.
        otherwise: without a copy, "nothing" (plain decoding) or "model" (the draft model drafts).
        length: maximum number of copied tokens in a round, after which the target is called; stop rule and cap may end
            a run sooner.
        reads: costs of target passes over 2, 4, 8 and 16 tokens, in units of one over a single token, as in
            "1.03x1.1x1.2x1.5", or "measured" on this machine; "free": copies are as long as ``length`` allows.
        step: cost of a draft step in the same unit, or "measured"; only read beside ``reads``.
    """

    n: int = count(3)
    least: int = count(2)
    otherwise: str = choice("nothing", "value of otherwise", ("nothing", "model"))
    length: int = count(LONGEST_COPY, 1, LONGEST_COPY)
    reads: str = _FREE
    step: float | str = number(STEP, 0.0, 100.0, MEASURED)
    needs_target: ClassVar[bool] = True  # the target writes the next token when nothing is copied

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        if self.least > self.n:
            raise UserError(f"least={self.least} is out of range: give at most n={self.n}")
        if self.reads not in (_FREE, MEASURED):
            _costs(self.reads)

    @property
    def uses_model(self) -> bool:
        """Whether the draft model drafts when nothing is copied (``otherwise``)."""
        return self.otherwise == "model"

    @property
    def proposer(self) -> Callable[[], Proposer]:
        """A factory of proposers that copy; a draft run that the model began stays with the model."""
        return lambda: _LookupProposer(self)


class _LookupProposer(Proposer):
    """Plans a round's copy once, and hands it out in parts."""

    def __init__(self, drafter: Lookup) -> None:
        self._drafter = drafter
        self._worth = None if drafter.reads == _FREE else _Worth(drafter)
        self._round, self._start, self._copied = 0, 0, list[int]()

    def propose(self, context: Context) -> Proposal | None:
        """Propose copied tokens; without any, leave the run to the model if it may draft."""
        drafter, begins = self._drafter, context.round != self._round
        if begins:
            self._round, self._start = context.round, len(context.text)
            self._copied = self._plan(context.text)
        drafted = list(context.text[self._start :])
        if drafted != self._copied[: len(drafted)]:  # the driver has cut the copy: another token stands there
            self._copied = []
        part = self._copied[len(drafted) :][: context.at_most]
        return context.certain(part) if part or not begins or not drafter.uses_model else None

    def _plan(self, text: Sequence[int]) -> list[int]:
        drafter, worth = self._drafter, self._worth
        if worth is not None:
            worth.learn(text)
        if (found := _find(text, drafter.n, drafter.least)) is None:
            return []
        length = drafter.length if worth is None else min(drafter.length, worth.length(found.size))
        copied = _copy(text, found.source, length)
        if worth is not None:
            worth.copied = (len(text), copied, found.size)
        return copied


class _Worth:
    """How many tokens of a copy pay.

    Attributes:
        copied: where the last copy begins in the text, its tokens, and how long an ending stood before.
    """

    def __init__(self, drafter: Lookup) -> None:
        reads = _costs(_READS if drafter.reads == MEASURED else drafter.reads)
        self._more = np.diff(reads)  # of the first copied token, the second, ...
        self._lowest = min(reads[k] / (k + 1) for k in range(len(reads)))  # a token's cost where all are kept
        self._kept = np.array(_CHANCES) * _WEIGHT
        self._tried = np.full(len(_CHANCES), _WEIGHT)
        self._price = _PRICE if drafter.uses_model else 1.0
        self._else = 0.0  # what a round of the draft model is expected to gain
        if drafter.uses_model:
            step = STEP if isinstance(drafter.step, str) else drafter.step
            chances = _DRAFTED ** np.arange(1, _ROUND + 1)
            self._else = max(0.0, *np.cumsum(chances * _PRICE - step - self._more[:_ROUND]))
        self.copied: tuple[int, list[int], int] = (0, [], 0)

    def learn(self, text: Sequence[int]) -> None:
        """Count which tokens of the last copy the text has kept, up to the first that it has not."""
        start, tokens, size = self.copied
        self.copied = (0, [], 0)
        for i, token in enumerate(tokens[: len(text) - start]):
            place = min(size + i, len(_CHANCES)) - 1
            self._tried[place] += 1
            if text[start + i] != token:
                return
            self._kept[place] += 1

    def length(self, size: int) -> int:
        """Number of tokens to copy behind an ending of ``size`` tokens.

        A kept token saves what the next one costs otherwise: the lowest price if the copy goes on, with its chance.
        """
        chance, gain, count = 1.0, 0.0, 0
        for more in self._more:
            place = min(size + count, len(_CHANCES)) - 1
            own = float(self._kept[place] / self._tried[place])
            chance *= own
            if chance * (own * self._lowest + (1 - own) * self._price) < more:
                break
            gain, count = gain + chance * self._price - more, count + 1
        return count if gain > self._else else 0


class _Match(NamedTuple):
    source: int  # where the copy begins
    size: int  # of the ending that stood before it


def _find(text: Sequence[int], n: int, least: int) -> _Match | None:
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
    return _Match(int(ends[-1]) + 1, size) if len(ends) and size >= least else None


def _copy(text: Sequence[int], source: int, length: int) -> list[int]:
    """The tokens from ``source`` on; the copy may overlap its source, so that a short cycle repeats."""
    found: list[int] = []
    for at in range(source, source + length):
        found.append(int(text[at]) if at < len(text) else found[at - len(text)])
    return found


def look_up(text: Sequence[int], n: int, least: int, at_most: int) -> list[int]:
    """Tokens that followed the latest earlier occurrence of the text's last tokens; [] if there is none."""
    found = _find(text, n, least)
    return [] if found is None else _copy(text, found.source, at_most)


def _costs(reads: object) -> list[float]:
    """Costs of passes over 1, 2, ... tokens, from those over some; raises a UserError for anything but numbers."""
    number = r"\d+(\.\d+)?"
    if not re.fullmatch(rf"{number}(x{number}){{{len(READS) - 1}}}", str(reads)):
        raise UserError(
            f"reads={reads} is out of range: give costs of passes over {', '.join(map(str, READS))} tokens as in "
            f"{_READS}, 'measured' or 'free'"
        )
    costs = [1.0, *map(float, str(reads).split("x"))]
    if any(a > b for a, b in pairwise(costs)):
        raise UserError(
            f"reads={reads} is out of range: a pass over more tokens costs no less, as in {_READS}"
        )
    return [float(cost) for cost in np.interp(range(1, READS[-1] + 1), (1, *READS), costs)]
