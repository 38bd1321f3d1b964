"""Leviathan's formulas: against sums, the enumerated loop, and Monte Carlo through the real loop."""

from __future__ import annotations

import pytest
import torch
from tests.theory.tools import INSTANCES, check_family, expected, from_zero, laws

from sprinter.decode.spec import Method
from sprinter.decode.stop import Fixed
from sprinter.errors import UserError
from sprinter.laws import overlap
from sprinter.theory.chains import MarkovChain
from sprinter.theory.montecarlo import estimate, simulate
from sprinter.theory.speculation import best_gamma, expected_tokens, speculative_speed_up


def independent(p: torch.Tensor, q: torch.Tensor, length: int) -> MarkovChain:
    """The same laws after every token and at every position: acceptances are independent."""
    v = len(p)
    return from_zero(MarkovChain(p.expand(length, v, v), q.expand(length, v, v), p))


def test_tokens_a_round_are_a_geometric_sum() -> None:
    for alpha in (0.0, 0.3, 0.9, 1 - 1e-9, 1.0):
        for gamma in (0, 1, 5, 40):
            wanted = sum(alpha**i for i in range(gamma + 1))
            assert float(expected_tokens(alpha, gamma)) == pytest.approx(wanted, abs=1e-10)
    assert float(expected_tokens(0.75, torch.inf)) == pytest.approx(4.0)


def test_speed_by_hand() -> None:
    assert float(speculative_speed_up(0.8, 0, 0.1)) == 1.0
    assert float(speculative_speed_up(0.8, 3, 0.1)) == pytest.approx((1 + 0.8 + 0.64 + 0.512) / 1.3)


def test_best_gamma_is_the_best_of_all() -> None:
    for alpha, cost in ((0.8, 0.1), (0.95, 0.02), (0.6, 0.3), (0.3, 0.5)):
        best = best_gamma(alpha, cost, most=60)
        speeds = [float(speculative_speed_up(alpha, gamma, cost)) for gamma in range(61)]
        assert speeds[best] == max(speeds)
    assert best_gamma(0.2, 0.5) == 0  # the draft costs more than it saves: α < c
    assert best_gamma(1.0, 0.0, most=30) == 30


@pytest.mark.parametrize("call", [
    lambda: expected_tokens(1.1, 3), lambda: expected_tokens(0.5, -1), lambda: best_gamma(0.5, -0.1),
    lambda: best_gamma(0.5, 0.1, most=-1),
])  # fmt: skip
def test_bad_arguments_are_named(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match="out of range"):
        call()


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_expected_tokens_in_the_enumerated_loop(gamma: int) -> None:
    p, q = (law[1] for law in laws(2, 2, seed=4))
    chain = independent(p, q, gamma + 1)
    found = expected(Method(stop=Fixed(gamma)), chain, lambda record: record.accept_lengths[0])
    assert found == pytest.approx(float(expected_tokens(overlap(p, q), gamma)), abs=1e-10)


@pytest.mark.slow  # the same is enumerated above
@pytest.mark.statistical
def test_expected_tokens_by_monte_carlo() -> None:
    """20 random laws and draft lengths, 250 first rounds each; false-alarm rate 0.1 %."""
    estimates, truths = [], []
    for i, (p, q) in enumerate(zip(*laws(INSTANCES, 5, seed=2), strict=True)):
        gamma = 1 + i % 7
        run = simulate(independent(p, q, gamma + 1), Method(stop=Fixed(gamma)), 250, seed=i)
        estimates.append(estimate(run.first_tokens))
        truths.append(float(expected_tokens(overlap(p, q), gamma)))
    check_family(estimates, truths)
