"""Trust rules by themselves. The conformance suite covers purity and laws."""

from __future__ import annotations

import pytest
import torch

from sprinter.decode.spec import TRUST
from sprinter.decode.trust import Coin, Everyone, Gate, Nobody
from sprinter.errors import UserError

SCORES = torch.tensor([0.0, 0.49999, 0.5, 0.50001, 1.0], dtype=torch.float64)


def test_a_gate_trusts_from_its_threshold_on() -> None:
    decision, state = Gate(0.5).trust({"gate": SCORES}, ())
    assert decision.tolist() == [False, False, True, True, True]
    assert state == ()
    assert Gate(0.0).trust({"gate": SCORES}, ())[0].all()
    assert Gate(1.0).trust({"gate": SCORES}, ())[0].tolist() == [False] * 4 + [True]


def test_a_coin_trusts_below_its_rate() -> None:
    assert Coin(0.5).trust({"uniform": SCORES}, ())[0].tolist() == [True, True, False, False, False]
    assert not Coin(0.0).trust({"uniform": SCORES}, ())[0].any()
    assert Coin(1.0).trust({"uniform": SCORES[:-1]}, ())[0].all()


def test_nobody_and_everyone() -> None:
    assert not bool(Nobody().trust({}, ())[0])
    assert bool(Everyone().trust({}, ())[0])


def test_which_rules_never_trust() -> None:
    """A gate at tau = 1 may meet a score of 1; a coin at rate 0 trusts nothing."""
    never = {name: TRUST.get(name)().never for name in ("nobody", "everyone", "gate", "coin")}
    assert never == {"nobody": True, "everyone": False, "gate": False, "coin": False}
    assert Coin(0.0).never
    assert not Gate(1.0).never


@pytest.mark.parametrize("value", [-0.1, 1.1, 7, float("nan"), float("inf"), "high", None, True])
@pytest.mark.parametrize(("rule", "name"), [(Gate, "tau"), (Coin, "rate")])
def test_thresholds_outside_the_unit_interval_are_refused(rule: type, name: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"^{name}={value} is out of range: give a number in \[0, 1\]$"):
        rule(value)
