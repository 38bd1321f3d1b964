"""What each row of a forward pass is charged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sprinter.decode.costs import PassCosts
from sprinter.decode.switch import PassShare, RoundCount, Tracker
from sprinter.engine.backends.base import DraftPlan, DraftRow, RowInput, TargetRow, TreeRow
from sprinter.engine.shares import pass_shares
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws

COSTS = PassCosts(((1, 1.0), (4, 1.3), (16, 4.0)), ((1, 0.2), (8, 0.5)), host=(0.01, 0.02, 0.0))


def target(tokens: int) -> TargetRow:
    return TargetRow(RowInput(0, 5, [1] * tokens), Sampling())


def draft(tokens: int, count: int = 1) -> DraftRow:
    plan = DraftPlan(Sampling(), (), {})
    return DraftRow(0, (1,) * tokens, 9, 1, AddressedDraws(), plan, count=count)


def spent(shares: list[PassShare]) -> float:
    return Tracker(COSTS).spent(shares, RoundCount(0, 1, 1, 1)).seconds


@pytest.mark.parametrize(("pads", "tokens"), [(True, 6.0), (False, 3.0)])
def test_rows_pay_the_whole_pass_and_longer_ones_what_they_cause(pads: bool, tokens: float) -> None:
    shares = pass_shares([target(n) for n in (1, 6, 4, 1)], pads, pads)
    paid = [spent(one) for one in shares]
    four = COSTS.for_rows(4)
    assert sum(paid) == pytest.approx(four.target_s(tokens))
    assert paid[0] == paid[3] == pytest.approx(four.target_s(1) / 4)
    assert (paid[1] - paid[0]) / (paid[2] - paid[0]) == pytest.approx(5 / 3)


def test_later_steps_of_a_draft_are_paid_by_the_rows_that_take_them() -> None:
    shares = pass_shares([draft(1, 3), draft(2, 1), draft(0, 2)], True, True)
    assert [[share.rows for share in one] for one in shares] == [[3, 2, 1], [3], [3, 2]]
    assert not any(share.target for one in shares for share in one)
    steps = COSTS.for_rows(3).draft_s(2), COSTS.for_rows(2).draft_s(1), COSTS.draft_s(1) + 0.02
    assert sum(map(spent, shares)) == pytest.approx(sum(steps))


def test_what_a_draft_must_read_after_a_rest_is_not_charged() -> None:
    (after_a_rest, other), (usual, _) = (
        pass_shares([draft(90), draft(1)], True, True),
        pass_shares([draft(2), draft(1)], True, True),
    )
    assert after_a_rest == usual and other[0].part == 0.0
    trees = [
        [(TreeRow(RowInput(0, 5, [1] * n), 1, DraftPlan(Sampling()))) for n in (read, 1)] for read in (90, 2)
    ]
    assert pass_shares(trees[0], True, True) == pass_shares(trees[1], True, True)
    (tips, _) = pass_shares(
        [(TreeRow(RowInput(0, 5, [1] * 6), 6, DraftPlan(Sampling()))), trees[0][1]], True, True
    )
    assert tips == [PassShare(False, 2, 6.0, 1.0)]


def test_a_head_that_reads_the_state_at_x_takes_a_pass_more() -> None:
    row = DraftRow(0, (1,), 9, 1, AddressedDraws(), DraftPlan(Sampling()), count=3)
    object.__setattr__(plan := DraftPlan(Sampling()), "reads_x", True)
    (more,) = pass_shares([replace(row, plan=plan)], True, True)
    (usual,) = pass_shares([row], True, True)
    assert len(more) == len(usual) + 1


def test_heads_draft_in_each_row_by_itself() -> None:
    tracker, (share,) = Tracker(COSTS), pass_shares([target(4)] * 2, True, True)[0]
    done = RoundCount(3, 1, 4, 2)
    alone = tracker.spent([share], done).seconds - spent([share])
    assert alone == pytest.approx(3 * (0.2 + 0.02)) and tracker.spent([share], done).rows == 2
