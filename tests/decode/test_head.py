"""``head=L``: the first L tokens have the target's law, whatever follows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from tests.decode.chains import Text

from sprinter.decode.accept import Fly, Fuzzy, GreedyMatch, Lenient
from sprinter.decode.conformance import check_same_law
from sprinter.decode.drafter import Model
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.meter import Meter
from sprinter.decode.method import Method
from sprinter.decode.spec import full_spec, parse_method
from sprinter.decode.stop import Fixed, Never, Svip, Untrusted
from sprinter.decode.trust import Coin, Everyone, Gate
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

LOSSY = {
    "gate": Method(trust=Gate(0.4), stop=Untrusted(), cap=3),
    "gate, tail": Method(trust=Gate(0.3), stop=Untrusted(tail=1), cap=3),
    "coin": Method(trust=Coin(0.5), stop=Untrusted(), cap=2),
    "draft alone": Method(trust=Everyone(), stop=Never()),
    "fuzzy": Method(stop=Fixed(2), accept=Fuzzy("tv", 0.4)),
    "greedy under svip": Method(stop=Svip(0.6), accept=GreedyMatch(), cap=3),
    "fly": Method(stop=Fixed(3), accept=Fly(1, 0.0)),
    "gate and lenient": Method(trust=Gate(0.5), stop=Untrusted(tail=1), accept=Lenient(0.5), cap=3),
}


def first(law: dict[Text, float], length: int) -> dict[Text, float]:
    """The law of the first tokens."""
    found: defaultdict[Text, float] = defaultdict(float)
    for text, chance in law.items():
        found[text[:length]] += chance
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "coin" else ()) for name in LOSSY]
)
def test_the_head_has_the_law_of_the_target(name: str) -> None:
    pair = MarkovPair(3, 4)
    without = joint_law(LOSSY[name], pair, 3)
    gap = max(abs(without.get(text, 0.0) - chance) for text, chance in target_joint_law(pair, 3).items())
    assert gap > 1e-3, "the method is not lossy here, so that its head shows nothing"
    for head in (1, 2, 3):
        _check_head(name, head, ahead=1)


@pytest.mark.parametrize("name", LOSSY)
def test_the_head_has_it_where_the_driver_drafts_ahead(name: str) -> None:
    for head in (1, 2):  # 1: it may end between the tokens of an answer
        _check_head(name, head, ahead=2)


def _check_head(name: str, head: int, ahead: int) -> None:
    """Assert that the first ``head`` tokens of three have the target's law."""
    pair = MarkovPair(3, 4)
    found = joint_law(replace(LOSSY[name], head=head), pair, 3, ahead=ahead)
    check_same_law(first(found, head), target_joint_law(pair, head), f"{name}, head {head}")
    assert abs(sum(found.values()) - 1) < 1e-9


def test_tokens_of_the_head_are_no_trusted_ones_and_have_no_drift() -> None:
    method = replace(LOSSY["gate and lenient"], head=6)
    record = run_chain(
        method, MarkovPair(5, 2, distance=0.3), (0,), Limits(40), AddressedDraws(1), complete=True
    )
    origins = [token.origin.value for token in record.tokens]
    assert "trusted" not in origins[:6] and "trusted" in origins[6:]
    assert [token.drift for token in record.tokens[:6]] == [0.0] * 6
    assert max(token.drift or 0.0 for token in record.tokens[6:]) > 0


@pytest.mark.parametrize("spec", ["draft-only(head=3)", "allocation(share=1.0)"])
def test_laws_that_no_target_call_will_score_are_not_held(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Meter, "wait", lambda self, position, *rest: waited.append(position))
    pair, method = MarkovPair(5, 2), parse_method(spec)
    record = run_chain(method, pair, (0,), Limits(30), AddressedDraws(1))
    assert sum(token.origin.value == "trusted" for token in record.tokens) >= 26 and not waited
    run_chain(method, pair, (0,), Limits(30), AddressedDraws(1), complete=True)
    assert len(waited) >= 26


def test_a_lossless_method_is_not_changed() -> None:
    """Several drafts too, which the exact rule could not judge."""
    for method in (Method(stop=Fixed(3)), parse_method("specinfer(drafts=2, gamma=2)")):
        texts = [
            run_chain(one, MarkovPair(5, 2), (0,), Limits(30), AddressedDraws(3))
            for one in (method, replace(method, head=9))
        ]
        assert texts[0].tokens == texts[1].tokens
    assert isinstance(method.drafter, Model) and method.drafter.drafts == 2


@pytest.mark.parametrize(
    "spec", ["sprinter(tau=0.6, head=8)", "fuzzy(head=2, cap=3)", "accept=lenient(w=0.5),head=4"]
)
def test_it_is_part_of_a_spec(spec: str) -> None:
    method = parse_method(spec)
    assert method.head == int(spec.split("head=")[1][0]) and not method.lossless()
    assert "head=" in method.name and parse_method(full_spec(method)) == method
    with pytest.raises(UserError, match=r"head=-1 is out of range: give a whole number >= 0"):
        parse_method("sprinter(tau=0.6, head=-1)")
