"""Trials of methods that rest: when they end, what they count, and what rounds at rest cost."""

from __future__ import annotations

import pytest

from sprinter.decode.costs import PassCosts
from sprinter.decode.switch import AdaptiveSwitch, RoundCount, Tracker


@pytest.mark.parametrize("length", [4, 48])
@pytest.mark.parametrize("engines", [False, True])
def test_a_trial_goes_on_in_the_next_text(length: int, engines: bool) -> None:
    """Else texts that are too short to lose a token's time would try for ever."""
    costs = PassCosts(((1, 1.0), (8, 1.05)), ((1, 0.04), (8, 0.04)))
    tracker, drafted = Tracker(costs, chains=True), list[bool]()
    for _ in range(2000 // length):
        if engines:
            past, tracker = tracker.past(), Tracker(costs, chains=True)
            tracker.follow(past)
        row = AdaptiveSwitch(tracker)
        for number in range(1, length + 1):
            drafted.append(row.drafts(number))
            row.count(RoundCount(4, 1, 5, 1) if drafted[-1] else RoundCount(0, 1, 1, 1))
    assert sum(drafted[1000:]) < 20 < sum(drafted)


def test_a_trial_waits_while_drafts_are_never_tried() -> None:
    costs = PassCosts(((1, 1.0), (2, 1.0), (5, 4.0)), ((1, 0.2), (9, 0.9)))
    rows = 1
    tracker = Tracker(costs, lambda: rows, chains=True)
    row, number = AdaptiveSwitch(tracker), 0
    while row.drafts(number := number + 1):  # until it rests
        row.count(RoundCount(2, 1, 3, 1))
    while not row.drafts(number):  # until it is tried again
        row.count(RoundCount(0, 1, 1, 1))
        number += 1
    rows = 4
    for _ in range(400):
        number += 1
        assert not row.drafts(number)
        row.count(RoundCount(0, 1, 1, 1))
    rows, other = 1, AdaptiveSwitch(tracker)
    assert not other.drafts(1)
    other.count(RoundCount(0, 1, 1, 1))
    assert row.drafts(number + 1), "it has not failed"


def test_forced_tokens_of_rows_that_rest_have_their_price() -> None:
    costs = PassCosts(((1, 1.0), (9, 1.2)), ((1, 0.5), (9, 0.5)))
    tracker = Tracker(costs)
    row, number = AdaptiveSwitch(tracker), 1
    while row.drafts(number):
        row.count(RoundCount(4, 1, 5, 1))
        number += 1
    for _ in range(5):
        row.count(RoundCount(0, 1, 5, 5))
        number += 1
        assert not row.drafts(number)
    time, tokens = tracker._rested
    assert tokens == 25 and time == pytest.approx(5 * 1.1)
