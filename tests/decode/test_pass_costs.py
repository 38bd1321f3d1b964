"""What forward passes cost, between the points that were measured and for rows that share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sprinter.decode.costs import PassCosts
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


@pytest.mark.parametrize(
    "changed",
    [{"shared": ((4, 1.0, 0.1), (2, 1.0, 0.1))}, {"shared": ((1, 1.0, 0.1),)}, {"shared": ((4, 0.0, 0.1),)},
     {"shared": ((4, 1.0),)}, {"host": (-1.0, 0.0, 0.0)}, {"host": (0.0,)}],
)  # fmt: skip
def test_costs_of_rows_that_make_no_sense(changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="ascending rows from 2"):
        replace(FLAT, **changed)
