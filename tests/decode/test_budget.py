"""``budget=``: exact at 0, kept at every token, and well spent. Worlds made to break it: ``test_budget_worst``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from tests.decode.chains import ids, paths
from tests.decode.test_head import LOSSY

from sprinter.decode import decoding
from sprinter.decode.accept import (
    Block,
    Cactus,
    Exact,
    Fuzzy,
    Lenient,
    Opt,
    RandomAccept,
    Relaxed,
    SpecInfer,
    Typical,
)
from sprinter.decode.budget import BUDGET_RUN, DriftAccount
from sprinter.decode.conformance import check_same_law
from sprinter.decode.decoding import Decoding
from sprinter.decode.draft import Draft, Origin, Record
from sprinter.decode.drafter import Model
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.lookup import Lookup
from sprinter.decode.loop import Limits
from sprinter.decode.method import Method
from sprinter.decode.spec import full_spec, parse_method
from sprinter.decode.stop import Confidence, Fixed, Never, Svip, Untrusted
from sprinter.decode.text_rules import TextRules
from sprinter.decode.trust import Certain, Coin, Everyone, Gate, Online
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

PAIR = MarkovPair(3, 4)
NEAR = MarkovPair(6, 2, sharp=2.0, distance=0.25)
ACCEPTING = {
    "opt": Method(stop=Fixed(5), accept=Opt(0.8)),
    "lenient": Method(stop=Fixed(5), accept=Lenient(0.0)),
    "fuzzy": Method(stop=Svip(2.0), accept=Fuzzy("tv", 0.9), cap=7),
    "relaxed": Method(stop=Fixed(3), accept=Relaxed(2, 0.4)),
    "typical": Method(stop=Fixed(5), accept=Typical()),
    "random": Method(stop=Fixed(5), accept=RandomAccept(0.5)),
}
TRUSTING = {
    "gate": Method(trust=Gate(0.5), stop=Untrusted(), cap=20),
    "gate, tail": Method(trust=Gate(0.5), stop=Untrusted(tail=2), cap=12),
    "certain": Method(trust=Certain("margin"), stop=Untrusted(), cap=20),
    "online": Method(trust=Online("max_prob"), stop=Untrusted(), cap=20),
    "coin": Method(trust=Coin(0.9), stop=Untrusted(), cap=20),
    "draft alone": Method(trust=Everyone(), stop=Never()),
    "on trial": Method(trust=Gate(0.5), stop=Untrusted(), cap=20, tail_ratio=0.3),
    "copies": Method(
        trust=Certain("margin"), stop=Untrusted(tail=3), drafter=Lookup(5, 5, Model(), 4), cap=20
    ),
}


def decoded(method: Method, seed: int, length: int = 120, pair: MarkovPair = NEAR, ahead: int = 1) -> Record:
    return run_chain(method, pair, (0,), Limits(length), AddressedDraws(seed), ahead=ahead, complete=True)


@pytest.mark.parametrize("name", LOSSY)
def test_at_0_the_text_has_the_law_of_the_target(name: str) -> None:
    method = replace(LOSSY[name], budget=0.0)
    assert method.lossless() and method.lossless(greedy=True) and method.needs_target
    check_same_law(joint_law(method, PAIR, 2, ahead=2), target_joint_law(PAIR, 2), name)


@pytest.mark.parametrize("budget", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("name", ACCEPTING)
def test_accept_rules_keep_to_it_at_every_token(name: str, budget: float) -> None:
    """The cost of a position is known before it is judged: no prefix is over, and most is spent where it can be."""
    method, used = replace(ACCEPTING[name], budget=budget), 0.0
    for seed in range(4):
        record = decoded(method, seed)
        drifts = [token.drift for token in record.tokens]
        for n, total in enumerate(accumulate(one or 0.0 for one in drifts), 1):
            assert total <= budget * n + 1e-6
        assert record.stats.spent_drift == pytest.approx(record.stats.drift_sum)
        assert record.stats.budget_left == pytest.approx(budget * 120 - record.stats.spent_drift)
        used += record.stats.mean_drift or 0.0
    free = sum(decoded(ACCEPTING[name], seed).stats.mean_drift or 0.0 for seed in range(4))
    assert used / 4 > min(0.75 * budget, 0.75 * free / 4)


@pytest.mark.parametrize("name", ["gate", "certain"])
def test_what_was_judged_exactly_is_not_called_trusted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriftAccount, "allows", lambda self, signals, position, wanted: True)
    tight, loose = (decoded(replace(TRUSTING[name], budget=one), 1, 60) for one in (1e-9, 1.0))
    assert {token.origin for token in tight.tokens} == {Origin.ACCEPTED, Origin.REPLACEMENT}
    assert tight.stats.checked == len(tight.tokens) and loose.stats.trusted > loose.stats.checked


@pytest.mark.parametrize("budget", [0.05, 0.2])
@pytest.mark.parametrize("name", TRUSTING)
def test_trusted_tokens_keep_to_it_at_every_token(name: str, budget: float) -> None:
    method, used = replace(TRUSTING[name], budget=budget), 0.0
    for seed in range(3):
        record = decoded(method, seed, 200)
        stats = record.stats
        assert stats.drift_coverage == 1 and stats.closing_passes == 0 and stats.trusted > 0
        for n, total in enumerate(accumulate(token.drift or 0.0 for token in record.tokens), 1):
            assert total <= budget * n + 1e-6
        assert stats.spent_drift == pytest.approx(stats.drift_sum)
        used += (stats.mean_drift or 0.0) / 3
    # Under a ratio tokens cost less than TV(q, p), which is predicted.
    assert used > (0.2 if name == "on trial" else 0.5) * budget


def test_copies_are_checked_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is as certain as can be, and says nothing of what the target thinks of it: tokens of the draft model are
    trusted, copies never, nor does the budget learn from them, and they end no run."""
    copies: set[tuple[int, int]] = set()  # round, position
    drafted: list[int] = []
    budgets: list[DriftAccount] = []
    ask, wait, allows = decoding._ask_rules, TextRules.wait, DriftAccount.allows

    def asked(own: Decoding, answer: Draft, i: int, position: int, copied: bool) -> tuple[bool, bool]:
        if answer.proposed:
            copies.add((own.record.stats.rounds, position))
        return ask(own, answer, i, position, copied)

    def waits(own: TextRules, position: int, answer: Draft, i: int, copied: bool) -> None:
        before = len(own._waiting)
        wait(own, position, answer, i, copied)
        if len(own._waiting) > before:
            drafted.append(position)
            assert not answer.proposed

    def seen(own: DriftAccount, *args: Any) -> bool:
        budgets.append(own)
        return allows(own, *args)

    monkeypatch.setattr(decoding, "_ask_rules", asked)
    monkeypatch.setattr(TextRules, "wait", waits)
    monkeypatch.setattr(DriftAccount, "allows", seen)
    method = Method(
        trust=Certain("max_prob"), stop=Untrusted(), drafter=Lookup(4, 4, Model(), 6), cap=20, budget=0.2
    )
    record = run_chain(method, NEAR, (0,), Limits(400), AddressedDraws(1), complete=True)
    origins = {(token.round, 1 + i): token.origin for i, token in enumerate(record.tokens)}
    assert Origin.TRUSTED not in {origins.get(place) for place in copies}
    assert len(copies) > 12 and any(origins.get(place) is Origin.ACCEPTED for place in copies)
    assert record.stats.trusted > 20 and len(drafted) > 100
    fit = budgets[-1]._fit
    assert fit is not None and int(fit[2]) <= len(drafted)


def test_copies_end_no_run_within_a_budget() -> None:
    """In a text that goes round in a circle all copies are right: a target call for each, though none is trusted."""

    class Circle(MarkovPair):
        def p(self, prefix: tuple[int, ...]) -> torch.Tensor:
            return super().p(prefix[-2:])

        def q(self, prefix: tuple[int, ...]) -> torch.Tensor:
            return self.p(prefix)

    pair, prompt = Circle(3, 3, sharp=60.0), (0, 1, 2)
    for trust, stop in ((Certain("max_prob", 0.9), Untrusted()), (Everyone(), Never())):
        method = Method(trust=trust, stop=stop, drafter=Lookup(2, 2, Model(), 8), budget=0.5)
        stats = run_chain(method, pair, prompt, Limits(96), AddressedDraws(1), complete=True).stats
        assert stats.target_calls < 20


def test_unspent_budget_is_not_lost_within_a_text() -> None:
    """A draft that is exact at first and bad later: the later tokens may cost more than the budget."""

    class Later(MarkovPair):
        def q(self, prefix: tuple[int, ...]) -> torch.Tensor:
            return self.p(prefix) if len(prefix) < 60 else super().q(prefix)

    record = decoded(replace(ACCEPTING["lenient"], budget=0.1), 1, 120, Later(6, 2, sharp=2.0))
    drifts = [token.drift or 0.0 for token in record.tokens]
    assert sum(drifts[:58]) < 1e-6 and sum(drifts[59:90]) / 31 > 0.15
    assert sum(drifts) / 120 <= 0.1 + 1e-9


def test_rules_of_chains_are_charged_by_the_round() -> None:
    for accept in (LOSSY["fly"].accept, Cactus(0.5)):
        method = Method(stop=Fixed(4), accept=accept, budget=0.15)
        worst, lossy = 0.0, 0
        for seed in range(8):
            stats = decoded(method, seed).stats
            assert stats.changed is not None and stats.spent_drift == pytest.approx(stats.changed)
            worst, lossy = max(worst, stats.changed / 120), lossy + (stats.changed > 0)
        assert worst <= 0.15 and lossy == 8


def test_texts_do_not_depend_on_how_far_the_driver_drafts_ahead() -> None:
    for method in (*TRUSTING.values(), *ACCEPTING.values()):
        one, three = (decoded(replace(method, budget=0.1), 3, 80, ahead=ahead) for ahead in (1, 3))
        assert ids(one) == ids(three)
        assert [token.drift for token in one.tokens] == [token.drift for token in three.tokens]


@pytest.mark.parametrize("name", ["gate", "certain", "draft alone", "lenient", "fuzzy"])
def test_the_meter_knows_the_law_within_a_budget(name: str) -> None:
    """The sum of drifts bounds the total variation of the texts, with every draw enumerated."""
    method = replace({**TRUSTING, **ACCEPTING}[name], budget=0.9)
    law: dict[tuple[int, ...], float] = {}
    mean, trusted = 0.0, 0
    for chance, record in paths(method, PAIR, 3, complete=True):
        law[ids(record)] = law.get(ids(record), 0.0) + chance
        assert record.stats.drift_sum is not None
        mean += chance * record.stats.drift_sum
        trusted += record.stats.trusted
    target = target_joint_law(PAIR, 3)
    gap = sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2
    assert 1e-3 < gap <= mean + 1e-12
    assert (trusted > 0) == (not method.trust.never)


@pytest.mark.parametrize("seed", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_copied_tokens_are_charged_as_what_becomes_of_them(seed: int) -> None:
    """A copy's law is certain and wrong as often as not: the prediction, and rules that learn, see that it fails."""
    copying = "drafter=lookup(n=2,least=1,otherwise=model,length=8),stop=untrusted(tail=2),cap=10"
    pair = MarkovPair(8, seed, sharp=3.0, distance=0.2)
    stats = decoded(parse_method(f"{copying},trust=certain,budget=0.05"), 0, 600, pair).stats
    assert stats.mean_drift is not None and stats.mean_drift < 0.06
    learned = decoded(parse_method(f"{copying},trust=online(tau=0.8)"), 0, 400, pair).stats
    assert learned.mean_drift is not None and learned.mean_drift < 0.2


def test_a_lossless_method_is_left_as_it_is() -> None:
    for method in (Method(stop=Fixed(4)), Method(stop=Svip(0.5), accept=Block(), cap=5)):
        assert ids(decoded(replace(method, budget=0.1), 2)) == ids(decoded(method, 2))
        stats = decoded(replace(method, budget=0.1), 2).stats
        assert (stats.budget, stats.spent_drift, stats.budget_left) == (0.1, 0.0, pytest.approx(12.0))
        assert ids(decoded(replace(method, budget=0.0), 2)) == ids(decoded(method, 2))


def test_a_run_without_a_cap_ends() -> None:
    record = decoded(Method(trust=Everyone(), stop=Never(), budget=1.0), 1, 100)
    assert record.stats.target_calls >= 100 // (BUDGET_RUN + 1)
    assert {token.origin for token in record.tokens} >= {Origin.TRUSTED, Origin.BONUS}


def test_the_head_and_the_budget() -> None:
    record = decoded(replace(TRUSTING["gate"], budget=0.2, head=40), 1)
    assert all(token.drift == 0 for token in record.tokens[:40])
    assert record.stats.mean_drift is not None and 0.05 < record.stats.mean_drift <= 0.21


def test_what_it_predicts_from() -> None:
    assert replace(TRUSTING["gate"], budget=0.1).needs == {"gate", "entropy"}
    assert replace(TRUSTING["certain"], budget=0.1).predicts == ("margin", "entropy")
    assert replace(TRUSTING["coin"], budget=0.1).predicts == ("entropy",)
    assert replace(ACCEPTING["lenient"], budget=0.1).needs == frozenset()
    assert replace(TRUSTING["gate"], budget=0.0).predicts == ()


def test_predictions_are_learned() -> None:
    """A signal that says nothing at first and all after some verdicts."""
    budget = DriftAccount(0.1, ("entropy",), 0)
    chance = torch.Generator().manual_seed(1)
    for _ in range(60):
        certain = torch.rand(4, generator=chance) < 0.5
        entropy = torch.where(certain, 0.2, 1.5)
        budget.learn({"entropy": entropy}, torch.where(certain, 0.98, 0.3).double())
    fit = budget._fit or budget._regression.start()
    low, high = (
        1 - float(budget._regression.predict({"entropy": torch.tensor(value)}, fit)) for value in (0.2, 1.5)
    )
    assert low < 0.06 and 0.6 < high < 0.8


@pytest.mark.parametrize(
    "spec",
    ["sprinter(budget=0.05)", "opt(budget=0.1)", "trust=gate(tau=0.5),budget=0.2", "draft-only(budget=0)"],
)
def test_it_is_a_part_of_a_spec(spec: str) -> None:
    method = parse_method(spec)
    assert method.budget is not None
    again = parse_method(full_spec(method))
    assert again.budget == method.budget and again.trust == method.trust


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(UserError, match=r"budget=1\.5"):
        parse_method("sprinter(budget=1.5)")
    with pytest.raises(UserError, match="give accept=exact"):
        Method(trust=Gate(0.5), stop=Untrusted(), accept=Lenient(0.5), cap=4, budget=0.1)
    assert Method(trust=Gate(0.5), stop=Confidence(0.4), accept=Exact(), cap=4, budget=0.1).sees_token


class Deceiving(MarkovPair):
    """A draft that is sure of what the target does not write."""

    def q(self, prefix: tuple[int, ...]) -> torch.Tensor:
        law = torch.full((self.vocab,), 1e-6, dtype=torch.float64)
        law[int(self.p(prefix).argmin())] = 1 - 1e-6 * (self.vocab - 1)
        return law


@pytest.mark.parametrize("name", ["gate", "certain", "draft alone", "on trial"])
def test_a_draft_that_deceives_eats_no_budget(name: str) -> None:
    """What it is sure of does not fit, and is judged exactly; the next runs know."""
    record = decoded(replace(TRUSTING[name], budget=0.05), 1, 60, Deceiving(6, 2))
    for n, total in enumerate(accumulate(token.drift or 0.0 for token in record.tokens), 1):
        assert total <= 0.05 * n + 1e-6
    assert all(token.origin is not Origin.TRUSTED for token in record.tokens[:10])
    assert record.stats.draft_steps < 120


def test_the_meter_does_not_change_a_text() -> None:
    for trust in (Gate(0.5), Everyone()):
        method = Method(trust=trust, stop=Untrusted(), cap=120, budget=0.1)
        one, two = (
            run_chain(method, NEAR, (0,), Limits(150), AddressedDraws(4), complete=complete)
            for complete in (False, True)
        )
        assert ids(one) == ids(two) and one.stats.drift_coverage == 1 and two.stats.closing_passes == 0


def test_a_budget_ends_no_run_that_nobody_is_trusted_in() -> None:
    method = Method(stop=Never(), accept=Lenient(0.8), cap=8)
    calls = [decoded(replace(method, budget=budget), 1).stats.target_calls for budget in (None, 1.0)]
    assert calls[0] == calls[1]


def test_a_rule_with_another_signal_keeps_its_decision() -> None:
    @dataclass(frozen=True)
    class Likely(Certain):
        @property
        def certainty(self) -> tuple[str, ...]:
            return ("max_prob_processed",)

    method = Method(trust=Likely(), stop=Untrusted(), cap=9, budget=0.1)
    assert method.predicts == ("entropy",) and not method.chooses_threshold
    assert decoded(method, 1).stats.mean_drift is not None


def test_several_drafts_under_a_lossy_rule_are_refused() -> None:
    @dataclass(frozen=True)
    class Claims(SpecInfer):
        @property
        def lossless(self) -> bool:
            return False

    for budget in (0.0, 0.1):
        with pytest.raises(UserError, match=f"budget={budget} has the exact rule judge one draft"):
            Method(accept=Claims(), stop=Fixed(2), drafter=Model(drafts=2), budget=budget)


def test_names_hold_one_budget() -> None:
    for spec in (
        "budget=0.2,trust=gate(tau=0.5)",
        "sprinter(budget=0.2)",
        "trust=coin(rate=0.5),budget=0.2,cap=4",
    ):
        made = parse_method(spec).replace(budget=0.05)
        assert made.name.count("budget=") == 1 and parse_method(made.name) == made


@pytest.mark.parametrize(("spec", "name"), [
    ("sprinter(tau=0.6, budget=0.2)", "sprinter(cap=20, tail=0, budget=0.2)"),
    ("certain(threshold=1, budget=0.2)", "certain(signal=entropy, cap=20, tail=0, budget=0.2)"),
    ("trust=online(tau=0.9,after=4),budget=0.2", "trust=online(signal=entropy,after=4,memory=500),budget=0.2"),
    ("sprinter(tau=0.6, budget=0)", "sprinter(tau=0.6, cap=20, tail=0, budget=0)"),
    ("coin(rate=0.4, budget=0.2)", "coin(rate=0.4, cap=20, budget=0.2)"),
])  # fmt: skip
def test_a_threshold_whose_place_a_budget_has_is_not_shown(spec: str, name: str) -> None:
    method = parse_method(spec)
    assert (method.name, method.settle({"gate": 0.7})) == (name, method)
    assert parse_method(name) == method
    if (dial := method.trust.dial) is not None:
        other = method.replace(trust=replace(method.trust, **{dial: 0.3}))  # type: ignore[type-var]
        assert (other == method) is method.chooses_threshold
