"""What forward passes cost, between the points that were measured and for rows that share them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from sprinter.decode.costs import EACH, PassCosts
from sprinter.decode.switch import PassShare, RoundCount, Tracker
from sprinter.errors import UserError

FLAT = PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.25), (9, 0.3)))


@pytest.mark.parametrize(
    ("target", "draft", "message"),
    [
        ((), (), "give two or more"),
        (((2, 1.0), (4, 2.0)), (), "the first of one token"),
        (((1, 1.0), (1, 2.0)), (), "ascending"),
        (((1, 1.0), (4, 0.0)), (), "positive seconds"),
        (((1, 1.0), (4, 2.0)), ((1, 1.0),), "costs of the draft"),
    ],
)
def test_costs_that_make_no_sense(target: tuple, draft: tuple, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(UserError, match=message):
        PassCosts(target, draft)


def test_costs_between_and_beyond_the_points() -> None:
    costs = PassCosts(((1, 1.0), (3, 2.0), (5, 2.0)), ((1, 0.5), (2, 0.7)))
    assert [costs.target_s(n) for n in (1, 2, 3, 4, 5, 9)] == [1.0, 1.5, 2.0, 2.0, 2.0, 2.0]
    assert costs.draft_s(4) == pytest.approx(1.1) and costs.step == 0.5
    assert (
        PassCosts(((1, 1.0), (9, 1.8))).token == pytest.approx(0.1)
        and PassCosts(((1, 1.0), (2, 1.0))).step == 0
    )


@pytest.mark.parametrize(
    ("points", "verify", "token"),
    [
        (((1, 1.0), (2, 1.5), (9, 1.5)), 0.5, 0.0),  # other kernels for more than one token
        (((1, 1.0), (2, 1.62), (9, 1.76)), 0.6, 0.02),
        (((1, 2.0), (3, 2.4), (9, 3.6)), 0.0, 0.1),
        (
            ((1, 1.0), (2, 1.0), (4, 1.0), (9, 2.6)),
            0.0,
            0.16,
        ),  # cheap at first: the mean of six, twice the best
        (((1, 1.0), (2, 1.4), (9, 1.2)), 0.3, 0.0),  # what no machine does
    ],
)
def test_costs_of_passes_over_several_tokens_are_a_line(points: Any, verify: float, token: float) -> None:
    costs = PassCosts(points)
    assert (costs.verify, costs.token) == (pytest.approx(verify, abs=1e-9), pytest.approx(token, abs=1e-9))


def test_learning_is_left_out_where_it_costs_more_than_it_gains() -> None:
    slow = PassCosts(((1, 0.1), (2, 0.1)), ((1, 0.02), (2, 0.02)), host=(0.001, 0.001, 0.001))
    fast = replace(slow, target=((1, 0.01), (2, 0.01)))
    assert slow.of_rules(True, 1).signal == "entropy" and slow.of_rules(True, 1).host[1] == 0.002
    assert fast.of_rules(True, 1).signal == "mean" and fast.of_rules(True, 1).host[1] == 0.001
    assert slow.of_rules(True, 8).signal == "mean"  # the host learns for one row after the other
    assert fast.of_rules(True).signal == "entropy" and fast.of_rules(True, 1).for_rows(2).signal == "mean"


def test_costs_of_rows_that_share_passes() -> None:
    one = PassCosts(((1, 1.0), (3, 2.0), (5, 2.0)), ((1, 0.5), (2, 0.7)))
    assert one.for_rows(1) == one and one.for_rows(8).target_s(1) == one.target_s(8)
    two = one.for_rows(2)  # without more knowledge two rows cost what two tokens of one do
    assert two.target_s(1) == one.target_s(2) and two.target_s(2) == one.target_s(4)
    assert two.draft_s(1) == one.draft_s(2)
    known = replace(one, shared=((2, 4.0, 0.9), (4, 8.0, 1.3)), host=(0.1, 0.01, 0.0))
    assert known.for_rows(1).target_s(1) == 1.1 and known.for_rows(1).draft_s(1) == 0.51
    assert known.for_rows(2).target_s(1) == pytest.approx(4.0 + 2 * 0.1)
    # The second token of each row costs what tokens 3 and 4 of one row do.
    assert known.for_rows(2).target_s(2) == pytest.approx(4.2 + one.target_s(4) - one.target_s(2))
    assert known.for_rows(3).target_s(1) == pytest.approx(6.0 + 3 * 0.1)
    assert known.for_rows(6).draft_s(1) == pytest.approx(1.7 + 6 * 0.01)
    assert replace(known, draft=()).for_rows(4).draft == ()


def test_a_draft_run_costs_its_start_once() -> None:
    one = PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.2), (9, 0.3)), shared=((4, 2.0, 0.5),))
    both = replace(one, start=0.3)
    assert (
        both.verify == pytest.approx(one.verify + 0.3) and both.step == one.step and both.reads == one.reads
    )
    length = both.best_run(0.8)[1]
    spent = 0.3 + 0.2 * length + both.target_s(1 + length)
    tokens = sum(0.8**kept for kept in range(length + 1))
    assert both.best_run(0.8) == (pytest.approx(tokens / spent), length)
    assert both.best_run(0.8)[0] < one.best_run(0.8)[0] and length >= one.best_run(0.8)[1]
    assert both.for_rows(4).start == 0.3, "a pass reads the draft's weights once for all rows"
    assert replace(both, draft=()).for_rows(4).start == 0.0, "copies need no draft"
    for rows in (1, 4):
        tracker = Tracker(both, lambda rows=rows: rows)
        drafted, plain = RoundCount(2, 1, 3, 1), RoundCount(0, 1, 1, 1)
        costs = both.for_rows(rows)
        assert tracker._time(drafted, rows) * costs.target_s(1) == pytest.approx(
            costs.target_s(3) + 2 * costs.draft_s(1) + 0.3
        )
        assert tracker._time(plain, rows) == 1.0
    passes = [PassShare(False, 4, 1.0, 0.25), PassShare(False, 2, 1.0, 0.5), PassShare(True, 4, 3.0, 0.25)]
    without = Tracker(one, lambda: 4).spent(passes, drafted).seconds
    assert Tracker(both, lambda: 4).spent(passes, drafted).seconds == pytest.approx(without + 0.3 / 4), (
        "a row's share"
    )
    longer = Tracker(one, lambda: 4).spent(passes, RoundCount(5, 1, 6, 1)).seconds
    assert longer == pytest.approx(without + 3 * one.draft_s(1)), (
        "three steps of heads, before two of the model"
    )
    with pytest.raises(UserError, match="not negative"):
        replace(one, start=-0.1)
    assert PassCosts([*one.target], [*one.draft], [*one.shared]).for_rows(4) == one.for_rows(4)  # type: ignore[arg-type]
    assert PassCosts.from_json(json.loads(json.dumps(asdict(both)))) == both


def test_costs_of_several_tokens_of_each_row() -> None:
    one = PassCosts(
        ((1, 1.0), (8, 2.4), (64, 13.6)), ((1, 0.5), (2, 0.7)), shared=((4, 3.0, 0.9), (8, 5.0, 1.0))
    )
    both = replace(one, several=((4, 9.0), (8, 19.0)))
    for rows, measured in ((4, 9.0), (8, 19.0), (6, 14.0)):
        assert both.for_rows(rows).target_s(1) == pytest.approx(one.for_rows(rows).target_s(1))
        assert both.for_rows(rows).target_s(EACH) == pytest.approx(measured)
        assert both.for_rows(rows).draft_s(1) == one.for_rows(rows).draft_s(1)
        assert both.for_rows(rows).target_s(2) == pytest.approx(
            (one.for_rows(rows).target_s(1) + measured) / 2
        ), "the tokens of one row cost the same each here"
    assert both.for_rows(1) == one.for_rows(1)
    assert both.for_rows(4).speed_up(0.9) < one.for_rows(4).speed_up(0.9)
    with pytest.raises(UserError, match="the same in both"):
        replace(one, several=((4, 9.0),))
    assert PassCosts.from_json(json.loads(json.dumps(asdict(both)))) == both


def test_a_round_that_drafts_costs_the_host_more_once() -> None:
    one = replace(FLAT, shared=((4, 2.0, 0.5),), host=(0.01, 0.02, 0.0))
    both = replace(one, judged=0.1, greedy=0.04)
    for rows in (1, 4):
        greedy, drawn = (both.of_rules(False, greedy=one) for one in (True, False))
        for costs, judged in ((greedy, 0.04), (drawn, 0.1)):
            more = costs.for_rows(rows).target_s(2) - one.for_rows(rows).target_s(2)
            assert more == pytest.approx(judged * rows), "greedy rounds draw nothing"
        plain, dear = one.for_rows(rows), both.for_rows(rows)
        assert dear.target_s(1) == plain.target_s(1) and dear.draft_s(1) == plain.draft_s(1)
        for tokens in (2, 3, 9):
            assert dear.target_s(tokens) == pytest.approx(plain.target_s(tokens) + 0.1 * rows)
    kept = asdict(both)
    assert PassCosts.from_json(json.loads(json.dumps(kept))) == both
    del kept["greedy"]
    assert PassCosts.from_json(kept).greedy == 0.1  # of an earlier version
    del kept["judged"]
    assert PassCosts.from_json(kept) == one
    for name in ("judged", "greedy"):
        with pytest.raises(UserError, match="not negative"):
            replace(one, **{name: -0.1})


def test_more_tokens_of_each_row_cost_no_less() -> None:
    """A pass that was timed while other programs ran does not make longer ones look free."""
    slow = PassCosts(((1, 1.0), (32, 4.0), (64, 20.0)), shared=((16, 6.0, 0.1),), several=((16, 7.0),))
    found = [slow.for_rows(16).target_s(tokens) for tokens in (1, 2, 3, 4)]
    assert found == sorted(found) and found[0] == 6.0


@pytest.mark.parametrize(
    "changed",
    [{"shared": ((4, 1.0, 0.1), (2, 1.0, 0.1))}, {"shared": ((1, 1.0, 0.1),)}, {"shared": ((4, 0.0, 0.1),)},
     {"shared": ((4, 1.0),)}, {"host": (-1.0, 0.0, 0.0)}, {"host": (0.0,)}],
)  # fmt: skip
def test_costs_of_rows_that_make_no_sense(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ascending rows from 2"):
        replace(FLAT, **changed)
