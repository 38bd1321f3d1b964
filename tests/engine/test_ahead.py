"""How many tokens are drafted per host synchronisation."""

from __future__ import annotations

import pytest

import sprinter
from sprinter.engine.lookahead import MOST, Ahead, best_ahead
from sprinter.errors import UserError


def test_synchronisation_that_costs_nothing_drafts_one_token() -> None:
    assert best_ahead(sync_s=0.0, step_s=1.0, goes_on=0.9) == 1


def test_costly_synchronisation_drafts_as_many_as_allowed() -> None:
    assert best_ahead(sync_s=1e3, step_s=1e-3, goes_on=0.9) == MOST


@pytest.mark.parametrize("goes_on", [0.3, 0.7, 0.95])
@pytest.mark.parametrize("sync_s", [0.2, 1.0, 3.0])
def test_the_choice_is_the_cheapest_by_enumeration(sync_s: float, goes_on: float) -> None:
    def seconds_a_run(k: int) -> float:
        """Over run lengths n >= 1 with P(n) = r^(n-1) (1 - r)."""
        return sum(goes_on ** (n - 1) * (1 - goes_on) * -(-n // k) * (sync_s + k) for n in range(1, 2000))

    assert best_ahead(sync_s, 1.0, goes_on) == min(range(1, MOST + 1), key=seconds_a_run)


def test_costs_are_learned_from_the_first_synchronisations() -> None:
    ahead = Ahead(None)
    # a step costs 0.1, a synchronisation 4.9
    for steps, seconds in ((1, 99.0), (2, 70.0), (1, 5.0), (2, 5.1)):
        assert ahead.next() == steps
        ahead.synchronised(steps, seconds)
    for _ in range(20):
        ahead.ended(9)
    long = ahead.next()
    for _ in range(4000):
        ahead.ended(0)  # now runs are over after one token
    assert long > 4
    assert ahead.next() < long


def test_by_a_given_cost_no_time_counts() -> None:
    """Then only the lengths of the drafts decide, so that counts of steps are repeatable."""
    ahead = Ahead(None, sync=1.5)
    assert ahead.next() == best_ahead(1.5, 1.0, 0.5) == 2
    for _ in range(20):
        ahead.synchronised(1, 9.0)
        ahead.ended(9)
    assert ahead.next() > 2
    for _ in range(400):
        ahead.ended(0)
    assert ahead.next() == 1
    assert Ahead(None, sync=0.0).next() == 1


def test_a_number_is_kept() -> None:
    ahead = Ahead(3)
    ahead.synchronised(3, 1.0)
    ahead.ended(5)
    assert ahead.next() == 3


@pytest.mark.parametrize("method", ["sprinter", "svip", "speculative(gamma=3)"])
def test_the_text_does_not_depend_on_the_choice(method: str) -> None:
    pair = sprinter.load_pair()
    kept = {"method": method, "max_new_tokens": 24, "seed": 5}
    one, chosen = (pair.generate("The river rises in", ahead=ahead, **kept) for ahead in (1, "auto"))
    assert [token.id for token in one.tokens] == [token.id for token in chosen.tokens]
    assert [token.drift for token in one.tokens] == pytest.approx(
        [token.drift for token in chosen.tokens], abs=1e-5
    )


def test_a_wrong_word_is_refused() -> None:
    with pytest.raises(UserError, match="ahead='often' is unknown: give a whole number >= 1, or 'auto'"):
        sprinter.load_pair().generate("The river", ahead="often")  # type: ignore[arg-type]
