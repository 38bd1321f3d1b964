"""The map of cost ratio and overlap: its regions, its bound, and what a fixed cost of calls does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sprinter.errors import UserError
from sprinter.theory.regions import GAIN, LONGEST_DRAFT, place
from sprinter.theory.speculation import speculative_speed_up

SHARES = st.floats(0.0, 1.0)


def test_a_draft_that_costs_as_much_as_it_saves_is_left_out() -> None:
    found = place(0.5, 0.6, kept=0.0)
    assert (found.region, found.gamma, found.exact, found.gain) == ("plain", 0, 1.0, 1.0)


def test_a_cheap_draft_is_checked_exactly_and_its_length_is_the_best() -> None:
    found = place(0.8, 0.1, kept=0.1)
    speeds = [float(speculative_speed_up(0.8, gamma, 0.1)) for gamma in range(LONGEST_DRAFT + 1)]
    assert found.region == "exact"
    assert found.exact == pytest.approx(max(speeds)) and speeds[found.gamma] == pytest.approx(found.exact)
    assert found.exact < found.trust < GAIN * found.exact


def test_trust_wins_where_much_may_be_kept_and_the_draft_costs_nothing() -> None:
    assert place(0.8, 0.0, kept=0.5).region == "trust"
    assert place(0.8, 0.0, kept=0.1).region == "exact"


@given(SHARES, SHARES, st.floats(0.0, 2.0))
def test_the_gain_is_bounded_by_the_errors_that_stay(overlap: float, kept: float, cost: float) -> None:
    found = place(overlap, cost, kept=kept)
    assert found.gain >= 1 - 1e-9
    # exact drafts of any length, at no cost, would be 1 / (1 - overlap) times as fast; so this holds for all costs
    # once drafts are as long as they like, and for short ones too: fewer errors help them less
    assert kept == 1 or found.gain <= 1 / (1 - kept) + 1e-9


@given(st.floats(0.05, 0.95), st.floats(0.0, 0.9))
def test_the_share_that_is_needed_is_needed(overlap: float, cost: float) -> None:
    found = place(overlap, cost, kept=0.0)
    if found.needed is None:
        assert place(overlap, cost, kept=1.0).gain < GAIN
    else:
        assert place(overlap, cost, kept=min(1.0, found.needed + 1e-6)).gain >= GAIN - 1e-6
        assert place(overlap, cost, kept=max(0.0, found.needed - 1e-3)).gain < GAIN


def test_a_fixed_cost_of_calls_makes_the_draft_cheaper() -> None:
    assert place(0.7, 0.4, kept=0.2, fixed=3.0) == place(0.7, 0.1, kept=0.2)


@pytest.mark.parametrize("wrong", [{"overlap": 1.2}, {"cost": -0.1}, {"kept": -1.0}, {"fixed": -2.0}])
def test_values_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        place(**{"overlap": 0.5, "cost": 0.1, "kept": 0.1, **wrong})
