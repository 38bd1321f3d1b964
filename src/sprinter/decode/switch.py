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

from sprinter.decode.costs import PassCosts

__all__ = ["DraftSwitch", "Paced", "Replayed", "RoundCount", "Tracker"]


# Tokens' time that a method may lose in one row before it is switched off, and the power of the number of rows that
# divides it: the mean over many rows tells more, and all of them lose it.
_LOSS, _MANY = 4.0, 2 / 3
_CREDIT = 8.0  # tokens' time that it may lose in addition, if it has gained as much before
# Tokens that are written plainly before the next trial; a trial that fails doubles them.
_REST, _LONGEST_REST = 64, 1024
_FADES = 256  # tokens after which the time of a token at rest counts no longer, but plain decoding's
_KEPT_TIMES = 4096  # kinds of rounds whose time is not computed again
_FAILS, _PASSES = 1.0, -0.5  # a trial ends where it has lost or gained so much


@dataclass(frozen=True, slots=True)
class RoundCount:
    """What a round did.

    Attributes:
        steps: draft steps. width: tokens that each of them reads, in the mean; more than one in trees.
        read: tokens that the target read. added: tokens of the text.
    """

    steps: int
    width: float
    read: int
    added: int


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

    def drafts(self, round: int) -> bool:
        """Whether the round drafts; asked once, at its beginning."""
        if (on := self._decide(round)) != self._on:
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
    def _decide(self, round: int) -> bool: ...

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

    def _decide(self, round: int) -> bool:
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
        apart: rows do it at different times, and passes are padded: the others wait for a longer one, and each is
            charged for all.
        longest: tokens that a round without draft steps adds at most; where even so many would lose time it is never
            tried. 0: not known.
    """

    costs: PassCosts
    rows: Callable[[], int] = lambda: 1
    copying: Tracker | None = None
    apart: bool = False
    longest: int = 0
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
    _counted: int = 0  # rounds of rows since it was last asked whether the loss is too great
    _by_rows: dict[int, PassCosts] = field(default_factory=dict)
    _times: dict[tuple[int, RoundCount], float] = field(default_factory=dict)

    def drafts(self, row: DraftSwitch) -> bool:
        """Whether this row drafts in its next round."""
        self._members.add(row)
        if self.longest and self._best(max(1, self.rows())) > 0:
            return False
        if self._on:
            return True
        if self._rest <= 0 and (self._trying is None or self._trying() is None):
            self._trying, self._balance, self._rest = weakref.ref(row), 0.0, 0.0
            time, tokens = self._rested
            self._price = min(1.0, time / tokens) if tokens else 1.0
        return self._trying is not None and self._trying() is row

    def count(self, row: DraftSwitch, drafted: bool, done: RoundCount) -> None:
        """Count a round of a row."""
        rows = max(1, self.rows())
        if self._on:
            if drafted:
                self._balance = max(self._balance + self._lost(done, rows) / rows, -_CREDIT)
                self._price = min(1.0, self._price + done.added / rows / _FADES)
            self._counted, among = self._counted + 1, len(self._members)
            # Rows do their rounds together: if some of them rested before the others, they would wait for those.
            if self._counted >= min(rows, among):
                self._counted = 0
                if self._balance > _LOSS / rows**_MANY:
                    self._leave()
        elif self._trying is None or self._trying() is not row:
            self._rest -= done.added / rows
            time, tokens = self._rested
            self._rested = time + self._time(done, rows), tokens + done.added
            if (
                self._trying is not None and self._rest < -_REST
            ):  # the row that tries it has said nothing for long: it failed, or waits
                self._leave()
        else:
            self._balance += self._lost(done, rows)
            if self._balance >= _FAILS:
                self._leave()
            elif self._balance <= _PASSES:
                self._on, self._trying, self._next_rest = True, None, _REST

    def _leave(self) -> None:
        self._on, self._trying, self._rested, self._counted = False, None, (0.0, 0), 0
        self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)

    def _lost(self, done: RoundCount, rows: int) -> float:
        """Time of a round in plain tokens, less that of its tokens at rest; summed over the rows that it delays."""
        time = self._time(done, rows)
        if self.apart:
            return rows * (time - self._price) - self._price * (done.added - 1)
        return time - self._price * done.added

    def _best(self, rows: int) -> float:
        """What is lost at the least where rounds are as long as they can be, and everything is kept."""
        time = self._time(RoundCount(0, 1, self.longest, self.longest), rows)
        return (rows * (time - 1) if self.apart else time - 1) - (self.longest - 1)

    def _time(self, done: RoundCount, rows: int) -> float:
        """Time of a round in plain tokens; its passes are shared by so many rows that all do the same."""
        key = rows, done
        if key not in self._times:
            if len(self._times) >= _KEPT_TIMES:
                self._times.clear()
            costs = self._by_rows.get(rows)
            if costs is None:
                costs = self._by_rows[rows] = self.costs.for_rows(rows)
            spent = costs.target_s(max(1, done.read)) + done.steps * costs.draft_s(done.width)
            self._times[key] = spent / costs.target_s(1)
        return self._times[key]


class Paced(DraftSwitch):
    """Drafts while that pays.

    Args:
        tracker: counts rounds; of this text alone, or common to the rows of an engine.
        changes, copy_changes: with a common tracker, those of a text that was interrupted and is written again, which
            are replayed in so many rounds, ``written``. A tracker of its own comes to the same decisions again.
    """

    def __init__(
        self,
        tracker: Tracker,
        changes: Sequence[int] = (),
        copy_changes: Sequence[int] = (),
        written: int = 0,
    ) -> None:
        super().__init__()
        self._tracker, self._written = tracker, written
        self._before = Replayed(changes, copy_changes)
        self._replays = False

    def _decide(self, round: int) -> bool:
        self._replays = round <= self._written
        return self._before.drafts(round) if self._replays else self._tracker.drafts(self)

    def _decide_copies(self, round: int) -> bool:
        if self._replays:
            return self._before.copies(round)
        return self._tracker.copying is not None and self._tracker.copying.drafts(self)

    def count(self, done: RoundCount) -> None:
        """Count the round's time against its tokens."""
        if self._replays:
            return
        if not self._on and self._tracker.copying is not None:
            self._tracker.copying.count(self, self._copying, done)
        self._tracker.count(self, self._on, done)
