"""Copies: drafts that a proposer plans once a round from earlier tokens, and how many tokens of them pay."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from sprinter.decode.costs import MEASURED, READS, STEP
from sprinter.decode.drafter import Context, Drafter, Proposal, Proposer
from sprinter.errors import UserError

__all__ = ["FREE", "LONGEST_COPY", "NO_COPY", "Copies", "Copy", "CopyProposer", "Worth", "check_reads"]

LONGEST_COPY = 511
"""Largest number of tokens that are copied in a round."""
FREE = "free"
"""Of ``reads``: copies are as long as other parameters allow."""

_READS = "1.03x1.1x1.2x1.5"  # where none were measured
# Of a copied token behind an ending of 1, 2, ... tokens that stood before: its chance, which so many verdicts count
# for. Answers of a 1.5 B model to code, maths, prose and chat (docs/decisions/0055-copies-that-pay.md).
_CHANCES, _WEIGHT = (0.25, 0.5, 0.6, 0.68, 0.75, 0.8, 0.85, 0.92), 6.0
# What a token of the draft model costs, in plain tokens, and its chance: following both through a text gains nothing.
_PRICE, _DRAFTED = 0.7, 0.8
_ROUND = 8  # draft tokens of a round, at most, in the comparison with the draft model


class Copies(Drafter):
    """Base of drafters that copy; subclasses have the field ``otherwise``, "nothing" or "model"."""

    otherwise: str
    needs_target: ClassVar[bool] = True  # the target writes the next token when nothing is copied

    @property
    def uses_model(self) -> bool:
        """Whether the draft model drafts when nothing is copied (``otherwise``)."""
        return self.otherwise == "model"


class Copy(NamedTuple):
    """A round's copy.

    Attributes:
        laws: ``[n, V]``, the laws that its tokens were drawn from; None: they were chosen without chance.
    """

    tokens: list[int]
    laws: Tensor | None = None


NO_COPY = Copy([])


class CopyProposer(Proposer):
    """Plans a round's copy once, and hands it out in parts; a draft run that the model began stays with the model."""

    def __init__(self, drafter: Copies) -> None:
        self._by_model = drafter.uses_model
        self._round, self._start, self._copy = 0, 0, NO_COPY

    @abstractmethod
    def plan(self, context: Context) -> Copy:
        """The copy of a round that begins."""

    def propose(self, context: Context) -> Proposal | None:
        """Propose copied tokens; without any, leave the run to the model if it may draft."""
        begins = context.round != self._round
        if begins:
            self._round, self._start = context.round, len(context.text)
            self._copy = self.plan(context)
        drafted = list(context.text[self._start :])
        if (
            drafted != self._copy.tokens[: len(drafted)]
        ):  # the driver has cut the copy: another token stands there
            self._copy = NO_COPY
        rows = slice(len(drafted), len(drafted) + context.at_most)
        part, laws = self._copy.tokens[rows], self._copy.laws
        if not part and begins and self._by_model:
            return None
        return context.certain(part) if laws is None else Proposal(part, laws[rows])


class _Priced(Protocol):
    """A drafter's parameters that ``Worth`` reads."""

    @property
    def reads(self) -> str: ...
    @property
    def step(self) -> float | str: ...
    @property
    def uses_model(self) -> bool: ...


class Worth:
    """How many tokens of a copy pay.

    Attributes:
        copied: where the last copy begins in the text, its tokens, and how long an ending stood before.
    """

    def __init__(self, drafter: _Priced) -> None:
        reads = check_reads(_READS if drafter.reads == MEASURED else drafter.reads)
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

    def length(self, size: int, shares: Sequence[float] = ()) -> int:
        """Number of tokens to copy behind an ending of ``size`` tokens.

        A kept token saves what the next one costs otherwise: the lowest price if the copy goes on, with its chance.

        Args:
            shares: of the occurrences of the ending and the tokens before each, those that go on with it; the chance of
                a token is its share of what an ending of this length promises. (): all do.
        """
        chance, gain, count = 1.0, 0.0, 0
        for more, share in zip_longest(self._more, shares, fillvalue=1.0):
            place = min(size + count, len(_CHANCES)) - 1
            own = share * float(self._kept[place] / self._tried[place])
            chance *= own
            if chance * (own * self._lowest + (1 - own) * self._price) < more:
                break
            gain, count = gain + chance * self._price - more, count + 1
        return count if gain > self._else else 0


def check_reads(reads: object) -> list[float]:
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
