"""A rule that reads any signal: enumerated, simulated and replayed alike."""

from __future__ import annotations

import pytest
from tests.decode.test_signals import Below
from tests.theory.tools import expected, from_zero, record_chain

from sprinter.decode.method import Method
from sprinter.decode.signals import SIGNALS
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError
from sprinter.theory.chains import MarkovChain
from sprinter.theory.montecarlo import estimate, simulate
from sprinter.theory.replay import check_replayable, replay

CHAIN = from_zero(MarkovChain.random(2, 4, seed=6))
LEAST = {"entropy": 0.6, "max_prob": 0.7, "token_prob": 0.5, "margin": 0.8}


@pytest.mark.parametrize("name", list(LEAST) + [f"{name}_processed" for name in LEAST])
def test_enumeration_simulation_and_replay_agree(name: str) -> None:
    """Target calls of one rule a signal; each interval holds at 99.99 %, false alarms 1 in 5000 a case."""
    one = SIGNALS[name]
    method = Method(stop=Below(name, LEAST[one.base], one.sees_token), cap=4)
    exact = expected(method, CHAIN, lambda record: record.stats.target_calls)
    fixed = expected(parse_method("speculative(gamma=4)"), CHAIN, lambda record: record.stats.target_calls)
    assert abs(exact - fixed) > 0.05, "the threshold matters"
    found = estimate(simulate(CHAIN, method, 300, seed=2).target_calls, 0.9999)
    assert found.holds(exact), (found, exact)
    again = estimate(replay(record_chain(CHAIN, 300, "target", seed=3), method, seed=5).by_text[:, 1], 0.9999)
    assert again.holds(exact), (again, exact)


def test_what_a_recording_will_hold_is_known_beforehand() -> None:
    for name in SIGNALS:
        check_replayable(Method(stop=Below(name)), ())
    with pytest.raises(UserError, match="needs the signal acceptable, which is not recorded"):
        check_replayable(Method(stop=Below("acceptable")), ())
    with pytest.raises(UserError, match="needs disco, which a Markov chain does not have"):
        simulate(CHAIN, Method(stop=Below("disco")), 2)
