"""Texts near their end do not begin to draft: the draft model would read all of them for a few tokens."""

from __future__ import annotations

from sprinter.decode.costs import PassCosts
from sprinter.decode.switch import AdaptiveSwitch, RoundCount, Tracker

COSTS = PassCosts(((1, 1.0), (100, 1.0)), ((1, 1.0), (100, 1.0)))


def rested(left: int) -> tuple[Tracker, AdaptiveSwitch, int]:
    """A row that lost with drafts, and then rested as long as it should; and its next round."""
    tracker = Tracker(COSTS)
    row, number = AdaptiveSwitch(tracker), 1
    while row.drafts(number, 500):
        row.count(RoundCount(1, 1, 1, 1))  # a draft step for nothing
        number += 1
    other = AdaptiveSwitch(tracker)  # of the next text
    for at in range(1, 65):
        assert not other.drafts(at, 500)
        other.count(RoundCount(0, 1, 1, 1))
    assert left > 0
    return tracker, other, 65


def test_a_trial_waits_for_a_text_that_goes_on() -> None:
    tracker, row, number = rested(31)
    assert not row.drafts(number, 31) and row.late
    row.count(RoundCount(0, 1, 1, 1))
    assert AdaptiveSwitch(tracker).drafts(1, 31), "a text that begins must read its prompt in any case"
    *_, row, number = rested(32)
    assert row.drafts(number, 32)


def test_a_text_that_has_drafted_goes_on_to_its_end() -> None:
    row = AdaptiveSwitch(Tracker(COSTS))
    for number, left in ((1, 40), (2, 20), (3, 1)):
        assert row.drafts(number, left)
        row.count(RoundCount(1, 1, 1, 3))


def test_a_text_that_has_rested_does_not_begin_again() -> None:
    """What it wrote meanwhile would have to be read."""
    row, number = AdaptiveSwitch(Tracker(COSTS)), 1
    while row.drafts(number, 500):
        row.count(RoundCount(1, 1, 1, 1))
        number += 1
    for left in (*range(470, 400, -1), *range(31, 0, -1)):
        assert left > 31 or not row.drafts(number, left)
        row.count(RoundCount(0, 1, 1, 1))
        number += 1


def test_rows_that_draft_do_not_draw_in_one_that_is_late() -> None:
    tracker = Tracker(COSTS, lambda: 2)
    first, second = AdaptiveSwitch(tracker), AdaptiveSwitch(tracker)
    tracker.follow(tracker.past()._replace(state=(False, True, 0.0, 1.0, (0.0, 0), 1.0, 64.0, (0.0, 0.0))))
    assert not first.drafts(1, 90) and not second.drafts(1, 40)
    for row in (first, second):
        row.count(RoundCount(0, 1, 1, 1))
    assert first.drafts(2, 89)
    for _ in range(8):
        first.count(RoundCount(1, 1, 1, 4))  # the trial passes
    assert first.drafts(3, 60) and not second.drafts(2, 31)


def test_copies_begin_at_any_time() -> None:
    """They need no model."""
    row, copying = (
        AdaptiveSwitch(Tracker(COSTS)),
        Tracker(PassCosts(((1, 1.0), (100, 1.0))), longest=8, reads=False),
    )
    row.drafts(1, 500)
    row.late = True
    assert copying.drafts(row)
