"""Never slower: whether a round drafts at all, from the costs of forward passes and the rounds so far.

A method that drafts loses time where few drafts are kept, or where many rows share each pass. Each round is charged
with what its passes cost on this machine, in units of plain decoding's time for a token, against the tokens that it
added. A method that has lost more than some tokens' time rests from then on, and is tried again at times. What the
draft model must then read of the text is spent once, and not counted.

Rounds that rest are plain decoding, or copy from the text (prompt lookup), which is switched in the same way.

The decision reads costs that were measured before and rounds that are over, no clock and no token to come: exact
methods stay exact across switches. The rounds at which it changes are recorded, and a record replays them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

from sprinter.decode.costs import PassCosts
from sprinter.decode.state import RuleState

__all__ = ["AdaptiveSwitch", "DraftSwitch", "PassShare", "Past", "Replayed", "RoundCount", "Tracker"]


# Tokens' time that a method may lose in one row before it is switched off, and the power of the number of rows that
# divides it: the mean over many rows tells more, and all of them lose it.
_LOSS, _MANY = 4.0, 2 / 3
_CREDIT = 8.0  # tokens' time that it may lose in addition, if it has gained as much before
# Tokens that are written plainly before the next trial; a trial that fails doubles them.
_REST, _LONGEST_REST = 64, 1024
_FADES = 256  # tokens after which the time of a token at rest counts no longer, but plain decoding's
_KEPT_TIMES = 4096  # kinds of rounds whose time is not computed again
_FAILS, _PASSES = 1.0, -0.5  # a trial ends where it has lost or gained so much
# Tokens: with fewer left a text does not begin to draft, but in its first round: the draft model must read it first.
_LEFT = 32
_BEST = 0.9  # of draft tokens that the target keeps, where a draft is as good as can be
_USUAL = 0.7  # the same of a usual draft
_LAG = 0.1  # of plain decoding's time: what the best of copies must gain among many rows to be tried
# Standard deviation of the number of a text's rounds, over its mean, of one token; of n tokens it is divided by √n.
_SPREAD = 0.6
_KEPT = 0.5  # of a round without draft steps: what counts of its tokens, but the first, among rows
_WASTE_FADES = 0.98  # a round's weight after each later one, in the mean of what sharing imperfectly costs


@dataclass(frozen=True, slots=True)
class RoundCount:
    """What a round did.

    Attributes:
        steps: draft steps. width: tokens that each of them reads, in the mean; more than one in trees.
        target_tokens: that the target read. added: tokens of the text.
    """

    steps: int
    width: float
    target_tokens: int
    added: int


@dataclass(frozen=True, slots=True)
class PassShare:
    """A row's share of a forward pass that several rows share.

    Attributes:
        target: whether it is the target's, or a draft step.
        rows: number of rows in it.
        tokens: that it reads of each row: the mean, or the longest where shorter ones are padded.
        part: of what the tokens after the first of each row cost, the part that this row causes.
    """

    target: bool
    rows: int
    tokens: float
    part: float


class Spent(NamedTuple):
    """The shares of the passes of a row's round, in seconds, and the number of rows in the target's."""

    seconds: float
    rows: int


class Past(NamedTuple):
    """What a ``Tracker`` knew at the end: its state, what rules had learned, and that of its copies."""

    state: tuple[Any, ...]
    learned: dict[Any, tuple[RuleState, int]]
    copying: Past | None


_PAST = "_on", "_begun", "_balance", "_price", "_rested", "_rest", "_next_rest", "_took"


class DraftSwitch(ABC):
    """Says before each round whether it drafts, and if not, whether it copies from the text.

    Attributes:
        changes: the rounds, counted from 1, from which on it no longer drafted, drafted again, and so on.
        copy_changes: the rounds from which on it copied where it rested, no longer did, and so on.
    """

    def __init__(self) -> None:
        self.changes: list[int] = []
        self.copy_changes: list[int] = []
        self._on, self._copying = True, False

    def drafts(self, round: int, left: int = _LEFT) -> bool:
        """Whether the round drafts; asked once, at its beginning. ``left``: tokens that may still be drafted."""
        if (on := self._decide(round, left)) != self._on:
            self._on = on
            self.changes.append(round)
        return on

    def copies(self, round: int) -> bool:
        """Whether a round that does not draft copies; asked once, after ``drafts``."""
        if (copying := self._decide_copies(round)) != self._copying:
            self._copying = copying
            self.copy_changes.append(round)
        return copying

    @abstractmethod
    def _decide(self, round: int, left: int) -> bool: ...

    def _decide_copies(self, round: int) -> bool:
        return False

    @abstractmethod
    def count(self, done: RoundCount) -> None:
        """Told after each round what it did."""


class Replayed(DraftSwitch):
    """Switches at the rounds of an earlier record.

    Args:
        changes, copy_changes: as in ``DraftSwitch``.
    """

    def __init__(self, changes: Sequence[int], copy_changes: Sequence[int] = ()) -> None:
        super().__init__()
        self._given = tuple(changes), tuple(copy_changes)

    def _decide(self, round: int, left: int) -> bool:
        return bisect_right(self._given[0], round) % 2 == 0

    def _decide_copies(self, round: int) -> bool:
        return bisect_right(self._given[1], round) % 2 == 1

    def count(self, done: RoundCount) -> None:
        """Nothing depends on it."""


@dataclass(slots=True)
class Tracker:
    """What a method has lost or gained so far in one text, or in all rows that are decoded together.

    Attributes:
        costs: of this pair on this machine.
        rows: number of rows that share a pass now.
        copying: the same of the copies in rounds that rest; None: they do not copy.
        apart: rows do it at different times, and one that tries it is charged what it causes alone. Else a trial is
            charged as if all rows did it, and shared passes as well as they did before.
        pads: a pass reads as many tokens of each row as of the longest.
        longest: tokens that a round without draft steps usually adds at most; where even so many would lose time it is
            never tried. 0: not known.
        chains: a draft model drafts exact chains: it is never tried among so many rows that the best of drafts would
            lose time.
        reads: a draft model drafts, which must first read what was written while drafts rested.
        awaited: tokens of a row's text where somebody waits for the last of these rows; else infinite.
        learned: what rules had learned at the end of texts, by a key of the caller's, and of how many it is the mean.
    """

    costs: PassCosts
    rows: Callable[[], int] = lambda: 1
    copying: Tracker | None = None
    apart: bool = False
    pads: bool = True
    longest: int = 0
    chains: bool = False
    reads: bool = True
    awaited: Callable[[], float] = lambda: inf
    learned: dict[Any, tuple[RuleState, int]] = field(default_factory=dict)
    _balance: float = 0.0  # tokens' time a row: what was lost, less what was gained
    _rest: float = 0.0  # tokens a row until the next trial
    _next_rest: float = _REST
    _on: bool = True
    # What a token took in the last rest, in plain tokens, and what it is the mean of: less than 1 where copies paid.
    _price: float = 1.0
    _rested: tuple[float, int] = (0.0, 0)  # time, tokens
    # The row that tries it while it is off; dead where its text has ended.
    _trying: weakref.ref[DraftSwitch] | None = None
    _members: weakref.WeakSet[DraftSwitch] = field(default_factory=weakref.WeakSet)  # rows that ask here
    # Those of them that have done a round that did not begin idle.
    _decoding: weakref.WeakSet[DraftSwitch] = field(default_factory=weakref.WeakSet)
    _counted: int = 0  # rounds of rows since it was last asked whether the loss is too great
    # Time of rounds that drafted, and what it would have been had all rows drafted as much at the same time.
    _took: tuple[float, float] = (0.0, 0.0)
    _plain: dict[int, float] = field(default_factory=dict)
    _by_rows: dict[int, PassCosts] = field(default_factory=dict)
    _times: dict[tuple[int, RoundCount], float] = field(default_factory=dict)
    _shares: dict[tuple[bool, int, float], tuple[float, float]] = field(default_factory=dict)
    _most: dict[int, float] = field(default_factory=dict)  # by rows, the best speed over plain decoding
    _begun: bool = False

    def follow(self, earlier: Past) -> None:
        """Begin where rows of the same method ended, in an engine before this one."""
        for name, value in zip(_PAST, earlier.state, strict=True):
            setattr(self, name, value)
        self.learned = {key: (state, 0) for key, (state, _) in earlier.learned.items()}
        if self.copying is not None and earlier.copying is not None:
            self.copying.follow(earlier.copying)

    def past(self) -> Past:
        """What a later one follows: without its rows, which hold an engine."""
        copying = None if self.copying is None else self.copying.past()
        return Past(tuple(getattr(self, name) for name in _PAST), dict(self.learned), copying)

    def learn(self, key: Any, state: RuleState, rows: int) -> tuple[RuleState, int]:
        """What ``learned`` says after one more text: the mean of the last ones, of as many as there are rows. The text
        that ends last in a batch is the one whose drafts were the worst."""
        before, count = self.learned.get(key, (state, 0))
        count = min(count + 1, rows)
        return before.toward(state, 1 / count), count

    def join(self, row: DraftSwitch) -> None:
        """Told before the first question of a row."""
        self._members.add(row)
        if self.copying is not None:
            self.copying.join(row)

    @property
    def idle(self) -> bool:
        """Whether no row drafts or copies in its next round, whichever asks: most rounds of many rows."""
        rows, copying = max(1, self.rows()), self.copying
        if copying is not None and not copying._never(rows):
            return False
        return (not self._on and self._rest > 0 and self._trying is None) or self._never(rows)

    def rest(self, tokens: int) -> None:
        """Count a row's round of so many tokens that began idle."""
        if self._trying is None:  # a trial that waits while drafts are never tried goes on later
            self._rest -= tokens / max(1, self.rows())
            time, rested = self._rested
            self._rested = time + tokens, rested + tokens

    def drafts(self, row: AdaptiveSwitch) -> bool:
        """Whether this row drafts in its next round."""
        if self._never(rows := max(1, self.rows())):
            return False
        if not self._begun:  # where usual drafts would lose time, one row tries it first
            self._begun = True
            self._on = not self.chains or self._costs_of(rows).speed_up(_USUAL) >= self._late(rows)
        late = row.late and self.reads
        if self._on:
            return not late
        if self._rest <= 0 and not late and (self._trying is None or self._trying() is None):
            self._trying, self._rest = weakref.ref(row), 0.0  # with the balance of a row before it that ended
            time, tokens = self._rested
            self._price = min(1.0, time / tokens) if tokens else 1.0
        return self._trying is not None and self._trying() is row

    def count(self, row: DraftSwitch, drafted: bool, done: RoundCount, spent: Spent | None = None) -> None:
        """Count a round of a row.

        Args:
            spent: in its passes; None: all rows do the same in each pass.
        """
        if self._never(rows := max(1, self.rows())):
            return
        plain = not drafted and done.target_tokens <= 1
        self._decoding.add(row)
        # A row that copies alone ends before the others, which then still run their passes.
        added = 1 + _KEPT * (done.added - 1) if self.longest and rows > 1 else done.added
        time = as_all = alike = 1.0 if plain else self._time(done, rows)
        if spent is not None and not plain:
            # Rows that still read their prompt, or that decode by other methods and are not always in the same passes,
            # would not be in those of plain decoding either.
            beside = min(rows, max(len(self._decoding), spent.rows))
            time = spent.seconds * beside / self._plain_s(beside)
            alike = self._time(done, beside)
        slower = self._late(rows) if drafted and self.chains else 1.0
        if self._on:
            if drafted:
                self._balance = max(self._balance + (slower * time - self._price * added) / rows, -_CREDIT)
                if self._balance < -_LOSS:  # they pay here: what trials that failed have said is of the past
                    self._next_rest = _REST
                self._price = min(1.0, self._price + done.added / rows / _FADES)
                self._took = self._took[0] * _WASTE_FADES + time, self._took[1] * _WASTE_FADES + alike
            self._counted += 1
            # Rows do their rounds together: if some of them rested before the others, they would wait for those.
            if self._counted >= min(rows, len(self._members)):
                self._counted = 0
                if self._balance > _LOSS / rows**_MANY:
                    self._leave()
        elif self._trying is None or self._trying() is not row:
            self._rest -= done.added / rows
            rested, tokens = self._rested
            self._rested = rested + time, tokens + done.added
            if (
                self._trying is not None and self._rest < -_REST
            ):  # the row that tries it has said nothing for long: it failed, or waits
                self._leave()
        else:
            self._balance += slower * (time if self.apart else self._waste * as_all) - self._price * added
            if self._balance >= _FAILS:
                self._leave()
            elif self._balance <= _PASSES:
                self._on, self._trying = True, None

    def spent(self, passes: Sequence[PassShare], done: RoundCount) -> Spent:
        """What a row's round took in its passes, of which it shared ``passes`` with others."""
        seconds = sum(map(self._share_s, passes))
        if run := next((share.rows for share in passes if not share.target), 0):
            seconds += self._costs_of(run).start / run
        # Heads draft in each row by itself, also where the draft model goes on after them.
        if (alone := done.steps - sum(not share.target for share in passes)) > 0:
            seconds += alone * self._costs_of(1).draft_s(done.width)
        return Spent(seconds, max((share.rows for share in passes if share.target), default=1))

    def _share_s(self, share: PassShare) -> float:
        key = share.target, share.rows, share.tokens
        if key not in self._shares:
            if len(self._shares) >= _KEPT_TIMES:
                self._shares.clear()
            costs = self._costs_of(share.rows)
            seconds = costs.target_s if share.target else costs.draft_s
            first = seconds(1)
            self._shares[key] = first / share.rows, seconds(share.tokens) - first
        first, more = self._shares[key]
        return first + share.part * more

    @property
    def _waste(self) -> float:
        """What rounds take, over what they would take if all rows drafted as much at the same time."""
        took, as_all = self._took
        return took / as_all if as_all else 1.0

    def _leave(self) -> None:
        if self._trying is not None:
            # A trial failed: what rounds took before counts less, as the rows may be others now.
            took, as_all = self._took
            self._took = (took + as_all) / 2, as_all
        self._on, self._trying, self._rested, self._counted = False, None, (0.0, 0), 0
        self._balance = 0.0
        self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)

    def _never(self, rows: int) -> bool:
        """Whether even the best round would lose time, so that it is not tried."""
        if not self.chains and not self.longest:
            return False
        if rows not in self._most:
            costs = self._costs_of(rows)
            self._most[rows] = costs.speed_up(_BEST) if self.chains else self._best(costs, rows)
        return self._most[rows] < (self._late(rows) if self.chains else 1 + _LAG * (1 - 1 / rows))

    def _late(self, rows: int) -> float:
        """How much longer a drafted round counts: rows that draft end at different times, and a batch with the last."""
        return _last_of(rows, self.awaited())

    def _best(self, costs: PassCosts, rows: int) -> float:
        """The speed of a round, over plain decoding, in which one row alone copies as much as can be and keeps all;
        among other rows a part of it counts, as they still run their passes when it has ended."""
        more = self.longest - 1
        tokens = self.longest if self.pads else 1 + more / rows
        kept = more if rows == 1 else _KEPT * more
        return (rows + kept) / rows * costs.target_s(1) / costs.target_s(tokens)

    def _time(self, done: RoundCount, rows: int) -> float:
        """Time of a round in plain tokens, if its passes are shared by so many rows that all do the same."""
        key = rows, done
        if key not in self._times:
            if len(self._times) >= _KEPT_TIMES:
                self._times.clear()
            costs = self._costs_of(rows)
            spent = costs.target_s(max(1, done.target_tokens)) + done.steps * costs.draft_s(done.width)
            spent += costs.start * (done.steps > 0)
            self._times[key] = spent / self._plain_s(rows)
        return self._times[key]

    def _plain_s(self, rows: int) -> float:
        """Seconds of a round of plain decoding in so many rows."""
        seconds = self._plain.get(rows)
        if seconds is None:
            seconds = self._plain[rows] = self._costs_of(rows).target_s(1)
        return seconds

    def _costs_of(self, rows: int) -> PassCosts:
        costs = self._by_rows.get(rows)
        if costs is None:
            costs = self._by_rows[rows] = self.costs.for_rows(rows)
        return costs


@lru_cache(maxsize=_KEPT_TIMES)
def _last_of(rows: int, tokens: float) -> float:
    """Rounds of the slowest of so many texts, over the mean: the largest of as many normal numbers (Blom 1958)."""
    largest = NormalDist().inv_cdf((rows - 0.375) / (rows + 0.25))
    return 1 + _SPREAD * largest / sqrt(tokens)


class AdaptiveSwitch(DraftSwitch):
    """Drafts while that pays.

    Args:
        tracker: counts rounds; of this text alone, or common to the rows of an engine.

    Attributes:
        late: whether the text is too near its end to begin with drafts of the draft model.
    """

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker
        self._passes: list[PassShare] = []  # of this round, if they are told
        self._joined = self._idle = self._drafted = self.late = False

    def _decide(self, round: int, left: int) -> bool:
        if not self._joined:
            self._joined = True
            self._tracker.join(self)
        self._idle, self.late = self._tracker.idle, left < _LEFT and round > 1 and not self._drafted
        drafts = not self._idle and self._tracker.drafts(self)
        self._drafted = drafts
        return drafts

    def _decide_copies(self, round: int) -> bool:
        copying = self._tracker.copying
        return not self._idle and copying is not None and copying.drafts(self)

    @property
    def charged(self) -> bool:
        """Whether the round is charged for its passes: plain decoding is not."""
        return self._on or self._copying

    def charge(self, share: PassShare) -> None:
        """Told of each forward pass in which the row took part, where rows share them; before ``count``."""
        self._passes.append(share)

    def count(self, done: RoundCount) -> None:
        """Count the round's time against its tokens."""
        if self._idle and done.target_tokens <= 1:  # a grammar may have forced more
            self._tracker.rest(done.added)
            return
        passes, self._passes = self._passes, []
        spent = self._tracker.spent(passes, done) if passes and self.charged else None
        if not self._on and self._tracker.copying is not None:
            self._tracker.copying.count(self, self._copying, done, spent)
        self._tracker.count(self, self._on, done, spent)
