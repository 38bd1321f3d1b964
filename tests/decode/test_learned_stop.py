"""SpecDec++ and DISCO: decisions by hand. Their laws are checked by the conformance suite and by enumeration."""

from __future__ import annotations

import pytest
import torch

from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.decode.stop import Disco, SpecDec
from sprinter.errors import UserError
from sprinter.heads.head import KINDS


def run(rule: SpecDec, chances: list[float]) -> list[bool]:
    state, stops = rule.begin_round(rule.start()), []
    for drafted, chance in enumerate(chances, start=1):
        signals = {"specdec++": torch.tensor(chance), "drafted": torch.tensor(drafted)}
        stop, state = rule.stop(signals, state)
        stops.append(bool(stop))
    return stops


def test_specdec_stops_where_a_refusal_has_become_likely():
    """Products 0.9, 0.72, 0.36, 0.252: 1 − 0.252 = 0.748 is the first above 0.7."""
    assert run(SpecDec(0.7), [0.9, 0.8, 0.5, 0.7]) == [False, False, False, True]
    assert run(SpecDec(0.6), [0.9, 0.8, 0.5, 0.7]) == [False, False, True, True]


def test_specdec_drafts_its_least_and_begins_each_run_anew():
    rule = SpecDec(0.5, least=3)
    assert run(rule, [0.1, 0.9, 0.9]) == [False, False, True]
    _, state = rule.stop({"specdec++": torch.tensor(0.1), "drafted": torch.tensor(1)}, rule.start())
    assert float(rule.begin_round(state)[0]) == 1.0


def test_disco_stops_below_its_threshold():
    rule = Disco(0.5)
    decisions = [bool(rule.stop({"disco": torch.tensor(v)}, ())[0]) for v in (0.49, 0.5, 0.9)]
    assert decisions == [True, False, False]


@pytest.mark.parametrize("name", ["specdec++", "disco"])
def test_the_presets_are_lossless_and_refuse_copied_drafts(name: str):
    method = parse_method(name)
    assert method.lossless()
    assert name in method.needs <= set(KINDS)
    with pytest.raises(UserError, match="looked-up tokens have none"):
        Method(stop=method.stop, drafter=parse_method("lookup").drafter)


@pytest.mark.parametrize("bad", [{"h": 1.5}, {"h": -0.1}, {"least": 0}])
def test_values_out_of_range_are_refused(bad: dict[str, float]):
    with pytest.raises(UserError, match=next(iter(bad))):
        SpecDec(**bad)  # type: ignore[arg-type]
