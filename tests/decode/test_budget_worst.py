"""The promise of ``budget=`` in worlds made to break it: at every token Σ drift <= budget × tokens so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from tests.decode.chains import LikelyToken, TablePair, UnlikelyToken
from tests.decode.test_head import LOSSY

from sprinter.decode.accept import Block, Exact
from sprinter.decode.budget import BUDGET_RUN, DriftAccount
from sprinter.decode.costs import PassCosts
from sprinter.decode.draft import Origin, Record
from sprinter.decode.enumerate import MarkovPair, check_same_law, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Untrusted
from sprinter.decode.switch import Replayed
from sprinter.decode.trust import Coin, Gate
from sprinter.random import AddressedDraws

SURE, WRONG = (0.97, 0.01, 0.01, 0.01), (0.01, 0.97, 0.01, 0.01)
COSTS = PassCosts(((1, 1.0), (9, 1.4)), ((1, 0.2), (9, 0.4)))
TRUSTING = (
    "sprinter", "sprinter(tail=3)", "sprinter(cap=400)", "certain(signal=margin,tail=3)", "certain(cap=400)",
    "online(cap=40)", "coin(rate=0.9)", "draft-only", "auto(budget=0.5)", "sprinter(tail=3,tail_ratio=0.005)",
    "trust=everyone,stop=confidence(c=0.5),cap=12", "trust=everyone,stop=fixed(gamma=30),accept=block",
    "trust=coin(rate=0.9),stop=svip(h=2)",
    "trust=gate(tau=0.3),stop=confidence(c=0.4),accept=threshold,cap=3",
    "trust=gate(tau=0.3),stop=confidence(c=0.4),accept=random(rate=0),cap=3",
    "trust=everyone,stop=confidence(c=0.5),accept=threshold,cap=12",
)  # fmt: skip
ACCEPTING = (
    "opt(epsilon=0.8)", "uno(epsilon=0.8)", "fuzzy(divergence=tv,threshold=1)", "lenient(w=0.1)", "mentored(kl=2)",
    "typical", "margin(theta=0.1)", "relaxed", "threshold(single=0.01)", "cascade", "cactus(delta=0.5)",
    "random(rate=0.9)", "fly(window=1,entropy=0)", "bild",
)  # fmt: skip


class Turns(TablePair):
    """A draft that is sure everywhere, and right at new token n (from 0) if ``agrees(n)``."""

    vocab = 4

    def __init__(self, agrees: Callable[[int], bool]) -> None:
        super().__init__(
            lambda text: SURE if agrees(len(text) - 1) else WRONG, lambda text: SURE, lambda text: 0.99
        )


def method_of(spec: str, budget: float) -> Method:
    return replace(parse_method(spec).settle({"gate": 0.6}, COSTS), budget=budget)


def decoded(method: Method, pair: TablePair, length: int, seed: int = 0, **more: Any) -> Record:
    limits = more.pop("limits", Limits(length))
    return run_chain(method, pair, (0,), limits, AddressedDraws(seed), **more)  # type: ignore[arg-type]


def worst(record: Record) -> float:
    """The largest mean drift of a beginning of the text, of which every token must be measured."""
    drifts = [token.distance for token in record.tokens]
    assert None not in drifts
    return max(total / n for n, total in enumerate(accumulate(map(float, drifts)), 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "length", "agrees", "budget"),
    [
        ("auto(budget=0.05)", 340, lambda n: n < 300, 0.05),
        ("certain(cap=400)", 600, lambda n: n < 300, 0.05),
        ("certain(tail=3)", 24, lambda n: n % 40 < 20, 0.02),
    ],
)
def test_a_draft_that_turns_wrong(
    spec: str, length: int, agrees: Callable[[int], bool], budget: float
) -> None:
    record = decoded(method_of(spec, budget), Turns(agrees), length)
    assert worst(record) <= budget + 1e-9 and len(record.tokens) == length
    assert record.stats.drift_coverage == 1  # the last tokens too, without a closing pass of the meter
    assert record.stats.target_calls < length


@pytest.mark.parametrize("spec", [*TRUSTING, *ACCEPTING])
def test_short_texts_at_every_phase(spec: str) -> None:
    """Texts of 1 to 30 tokens; the draft turns wrong, or right, at every token of them."""
    lossy = 0.0
    for phase in range(30):
        for budget in (0.02, 0.2) if phase % 2 else (0.05, 0.5):
            pair = Turns(lambda n, phase=phase: (n < phase) == (phase % 3 > 0))  # type: ignore[misc]
            record = decoded(method_of(spec, budget), pair, 1 + phase, phase)
            assert worst(record) <= budget + 1e-9
            lossy += record.stats.spent_drift
    assert lossy > 0


@pytest.mark.parametrize("spec", TRUSTING)
def test_worlds_that_lure(spec: str) -> None:
    """Right for long, wrong from then on; always wrong; in turn, token by token and in blocks as long as runs."""
    trusted = 0
    worlds = (lambda n: n < 70, lambda n: False, lambda n: n % 2 == 0, lambda n: n // BUDGET_RUN % 2 == 0)
    for seed, agrees in enumerate(worlds):
        budget, ahead = ((0.05, 1), (0.1, 3))[seed % 2]
        record = decoded(method_of(spec, budget), Turns(agrees), 100, seed, ahead=ahead)
        assert worst(record) <= budget + 1e-9
        trusted += record.stats.trusted
    assert trusted > 0


@pytest.mark.slow
def test_a_long_text() -> None:
    for spec in ("auto(budget=0.05)", "sprinter(cap=400)"):
        record = decoded(method_of(spec, 0.05), Turns(lambda n: n < 1500 or n % 7 == 0), 2000)
        assert worst(record) <= 0.05 + 1e-9 and record.stats.spent_drift > 60


def test_switches_at_every_phase() -> None:
    for first in range(1, 12):
        record = decoded(
            method_of("sprinter(tail=3)", 0.1), Turns(lambda n: n % 9 < 6), 40, first,
            switch=lambda _, first=first: Replayed((first, first + 2, first + 3), (first,)),
        )  # fmt: skip
        assert worst(record) <= 0.1 + 1e-9


def test_texts_that_end_in_a_run() -> None:
    """An EOS, or the last token allowed, that is trusted is measured too, and without a closing pass."""
    trusted_ends = 0
    for seed in range(12):
        ends = Limits(60, lambda text: "eos" if text[-1] == 2 else None)
        pair = TablePair(lambda text: (0.9, 0.02, 0.08), lambda text: (0.92, 0.02, 0.06), lambda text: 0.99)
        record = decoded(method_of("sprinter", 0.05), pair, 60, seed, limits=ends)
        assert worst(record) <= 0.05 + 1e-9 and record.stats.closing_passes == 0
        trusted_ends += record.tokens[-1].origin is Origin.TRUSTED
    assert trusted_ends > 3


def test_no_run_has_more_trusted_tokens_than_one_may() -> None:
    for spec in ("draft-only", "certain(cap=400)", "trust=everyone,stop=fixed(gamma=60),cap=60"):
        record = decoded(method_of(spec, 1.0), Turns(lambda n: True), 130)
        rounds = [token.round for token in record.tokens if token.origin is Origin.TRUSTED]
        assert max(map(rounds.count, rounds)) == BUDGET_RUN


SEEING = Method(trust=LikelyToken(0.3), stop=Untrusted(), cap=3)
JUDGED = {
    **{name: LOSSY[name] for name in ("gate", "gate, tail", "draft alone")},
    "coin": Method(trust=Coin(0.5), stop=Untrusted(), cap=2),
    "on trial": Method(trust=Gate(0.3), stop=Untrusted(), cap=3, tail_ratio=0.4),
    "sees the token": SEEING,
    "stops by the token": Method(trust=Gate(0.3), stop=UnlikelyToken(0.3), accept=Exact(), cap=3),
    "block": Method(trust=Gate(0.3), stop=Untrusted(tail=1), accept=Block(), cap=3),
    **{
        f"sees the token, {accept}": replace(SEEING, accept=parse_method(f"accept={accept},cap=3").accept)
        for accept in ("threshold", "random(rate=0)", "block")
    },
}


@pytest.mark.parametrize("name", JUDGED)
def test_what_does_not_fit_is_judged_exactly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the rule trusts is drafted, and no drift fits: the texts have the target's law to 1e-9."""
    monkeypatch.setattr(
        DriftAccount, "allows", lambda self, signals, position, wanted: True if wanted is None else wanted
    )
    pair = MarkovPair(2, 4)
    method = replace(JUDGED[name], budget=1e-6)
    check_same_law(joint_law(method, pair, 3), target_joint_law(pair, 3), name)
    method = replace(method, budget=0.9)
    texts, target = joint_law(method, pair, 3), target_joint_law(pair, 3)
    assert max(abs(texts.get(text, 0.0) - chance) for text, chance in target.items()) > 1e-3
