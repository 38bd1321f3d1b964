"""Copies: drafts that are planned once a round from earlier tokens, chains of those who plan, and what of a copy pays.

A chain is a drafter that copies with another one behind it (``otherwise``), and so on: ``suffix(otherwise=lookup)``.
Each round belongs to one of them, and each token's law is that of the drafter which wrote it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import inf
from typing import ClassVar, NamedTuple, Self

import numpy as np
from torch import Tensor

from sprinter.decode.checks import Parameters
from sprinter.decode.costs import MEASURED, READS, STEP
from sprinter.decode.drafter import Allocated, Context, Drafter, Proposal, Proposer
from sprinter.decode.sequence import Siblings
from sprinter.errors import UserError

__all__ = ["FREE", "LONGEST_COPY", "NO_COPY", "Copier", "Copies", "Copy", "Worth"]

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
    """Base of drafters that copy, and of chains that begin with one; subclasses are dataclasses with these fields.

    Args:
        otherwise: who drafts in rounds in which nothing is copied: another drafter that copies, the draft model, heads,
            a drafter of a plug-in, or "nothing".
        length: maximum number of copied tokens in a round.
        reads: costs of target passes over 2, 4, 8 and 16 tokens, in units of one over a single token, as in
            "1.03x1.1x1.2x1.5", or "measured" on this machine; "free": copies are as long as ``length`` allows.
        step: cost of a draft step in the same unit, or "measured"; only read beside ``reads``.
    """

    otherwise: Drafter
    length: int
    reads: str
    step: float | str
    needs_target: ClassVar[bool] = True  # the target writes the next token when nothing is copied

    def __post_init__(self) -> None:
        Parameters.__post_init__(self)
        last = self.otherwise
        fits = isinstance(last, Drafter) and last.siblings is Siblings.ALONE
        if not fits or isinstance(last, Allocated):
            raise UserError(
                f"otherwise={last} is out of range: give a drafter of chains, such as model or lookup"
            )
        if self.reads not in (FREE, MEASURED):
            check_reads(self.reads)
        object.__setattr__(self, "greedy", last.greedy)
        object.__setattr__(self, "tokens_a_pass", last.tokens_a_pass)
        object.__setattr__(self, "target_states", last.target_states)
        object.__setattr__(self, "sure", last.sure)

    @property
    def links(self) -> Iterator[Copies]:
        """Those of the chain that copy, in order."""
        yield self
        if isinstance(self.otherwise, Copies):
            yield from self.otherwise.links

    @property
    def last(self) -> Drafter:
        """Who drafts in rounds in which nothing is copied."""
        return self.otherwise.last if isinstance(self.otherwise, Copies) else self.otherwise

    @property
    def uses_model(self) -> bool:
        """Whether the chain ends with the draft model."""
        return self.last.uses_model

    @property
    def by_heads(self) -> bool:
        """Whether the chain ends with heads on the target."""
        return self.last.by_heads

    @property
    def head_kind(self) -> str | None:
        """The kind of these heads."""
        return self.last.head_kind

    @property
    def reads_earlier(self) -> bool:
        """Whether one of the chain reads earlier texts."""
        return self.otherwise.reads_earlier

    @property
    def recycles(self) -> bool:
        """Whether one of the chain reads what the target said after each token."""
        return self.otherwise.recycles

    @property
    def proposer(self) -> Callable[[], Proposer]:
        """A factory of proposers that copy; a draft run that the last of the chain began stays with it."""
        return lambda: _CopyProposer(self)

    @abstractmethod
    def copier(self) -> Copier:
        """What plans the copies of a text."""

    def settle(self, accuracies: Sequence[Sequence[float]]) -> Self:
        """With settled heads."""
        return replace(self, otherwise=self.otherwise.settle(accuracies))  # type: ignore[type-var]


class Copy(NamedTuple):
    """A round's copy.

    Attributes:
        laws: ``[n, V]``, the laws that its tokens were drawn from; None: they were chosen without chance.
        gain: what it is expected to gain, in tokens of plain decoding; without costs as much as can be.
    """

    tokens: list[int]
    laws: Tensor | None = None
    gain: float = inf


NO_COPY = Copy([], None, 0.0)


class Copier(ABC):
    """Plans copies for one text; may keep state between them, which must depend on the contexts alone."""

    @abstractmethod
    def plan(self, context: Context) -> Copy:
        """The copy of a round that begins."""


class _CopyProposer(Proposer):
    """Plans a round's copy once, and hands it out in parts: the first of the largest gain. Without any, the round is
    left to the last of the chain."""

    def __init__(self, drafter: Copies) -> None:
        self._copiers = [link.copier() for link in drafter.links]
        last = drafter.last
        self._other, self._hands_over = None if last.proposer is None else last.proposer(), last.proposes
        self._round, self._start, self._copy, self._copies = 0, 0, NO_COPY, False

    def propose(self, context: Context) -> Proposal | None:
        """Propose copied tokens; without any, leave the round to the last of the chain, if it may draft."""
        if context.round != self._round:
            self._round, self._start = context.round, len(context.text)
            self._copy = self._plan(context)
            self._copies = bool(self._copy.tokens)
        if not self._copies and self._hands_over:
            return None if self._other is None else self._other.propose(context)
        drafted = list(context.text[self._start :])
        if (
            drafted != self._copy.tokens[: len(drafted)]
        ):  # the driver has cut the copy: another token stands there
            self._copy = NO_COPY
        rows = slice(len(drafted), len(drafted) + context.at_most)
        part, laws = self._copy.tokens[rows], self._copy.laws
        return context.certain(part) if laws is None else Proposal(part, laws[rows])

    def _plan(self, context: Context) -> Copy:
        best = NO_COPY
        for copier in self._copiers:
            copy = copier.plan(context)
            best = copy if copy.tokens and copy.gain > best.gain else best
            if best.gain == inf:
                break
        return best


class Worth:
    """How many tokens of a copy pay.

    Attributes:
        never: whether none does, however likely it is.
        copied: where the last copy begins in the text, its tokens, and how long an ending stood before.
    """

    def __init__(self, drafter: Copies) -> None:
        self._kept = [chance * _WEIGHT for chance in _CHANCES]
        self._tried = [_WEIGHT] * len(_CHANCES)
        reads, proposes = _READS if drafter.reads == MEASURED else drafter.reads, drafter.last.proposes
        self._price = _PRICE if proposes else 1.0
        step = STEP if isinstance(drafter.step, str) else drafter.step
        self._more, self._lowest, self._else, self.never = _terms(reads, step, self._price, proposes)
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

    @classmethod
    def of(cls, drafter: Copies) -> Worth | None:
        """That of a text; None: copies are free."""
        return None if drafter.reads == FREE else cls(drafter)

    def paying(self, size: int, most: int, shares: Sequence[float] = ()) -> tuple[int, float]:
        """Number of tokens to copy behind an ending of ``size`` tokens, at most ``most``, and their expected gain.

        A kept token saves what the next one costs otherwise: the lowest price if the copy goes on, with its chance.

        Args:
            shares: of the occurrences of the ending and the tokens before each, those that go on with it; the chance of
                a token is its share of what an ending of this length promises. (): all do.
        """
        chance, gain, count = 1.0, 0.0, 0
        for more in self._more[:most]:
            place = min(size + count, len(_CHANCES)) - 1
            own = self._kept[place] / self._tried[place] * (shares[count] if shares else 1.0)
            chance *= own
            if chance * (own * self._lowest + (1 - own) * self._price) < more:
                break
            gain, count = gain + chance * self._price - more, count + 1
        return (count, gain) if gain > self._else else (0, 0.0)


@lru_cache
def _terms(reads: str, step: float, price: float, proposes: bool) -> tuple[list[float], float, float, bool]:
    """What a ``Worth`` begins with: costs of the first copied token, the second, ...; a token's cost where all are
    kept; what a round of the draft model is expected to gain; and whether even a copy that is kept whole gains too
    little, as where many rows share each pass."""
    costs = check_reads(reads)
    more, otherwise = np.diff(costs), 0.0
    if proposes:
        chances = _DRAFTED ** np.arange(1, _ROUND + 1)
        otherwise = max(0.0, *np.cumsum(chances * price - step - more[:_ROUND]))
    lowest = min(cost / (k + 1) for k, cost in enumerate(costs))
    return more.tolist(), lowest, otherwise, bool(np.max(np.cumsum(price - more)) <= otherwise)


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
