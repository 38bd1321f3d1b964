"""The gate that is fitted while decoding: what it learns, when, and from which positions."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from sprinter.decode import Method, Online, State, Untrusted, check_trust, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.draft import Record
from sprinter.decode.enumerate import ChainDriver, MarkovPair, joint_law, target_joint_law
from sprinter.decode.loop import Limits, decode
from sprinter.decode.state import RuleState
from sprinter.errors import UserError
from sprinter.laws import overlap
from sprinter.random import AddressedDraws

PAIR = MarkovPair(4, seed=7, sharp=2.0, distance=0.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Notes(Online):
    """Writes down what it is taught."""

    taught: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list, compare=False)

    def learn(self, signals, overlaps, state: State) -> State:  # type: ignore[no-untyped-def]
        self.taught.append((signals["margin"], overlaps))
        return Online.learn(self, signals, overlaps, state)


def text(
    rule: Online, length: int = 60, complete: bool = False, tail: int = 0, rules: RuleState | None = None
) -> Record:
    method, record, draws = Method(trust=rule, stop=Untrusted(tail), cap=20), Record(), AddressedDraws(3)
    driver = ChainDriver(PAIR, draws)
    loop = decode((0,), method, Limits(length), draws, record, complete, rules)
    request = next(loop, None)
    while request is not None:
        try:
            request = loop.send(driver.answer(request))
        except StopIteration:
            request = None
    return record


def logistic(count: int, bias: float, slope: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Margins and overlaps that a logistic law connects."""
    numbers = torch.Generator().manual_seed(seed)
    margins = 6 * torch.rand(count, generator=numbers, dtype=torch.float64)
    return margins, torch.sigmoid(bias + slope * margins)


# --- what it learns ---------------------------------------------------------------------------------------------------
def test_it_finds_the_law_that_the_verdicts_follow() -> None:
    rule = Online("margin", memory=10_000)
    margins, overlaps = logistic(3000, -1.0, 0.8)
    state = rule.learn({"margin": margins}, overlaps, rule.start())
    shown = torch.tensor([0.5, 2.0, 5.0], dtype=torch.float64)
    assert rule.predict({"margin": shown}, state).tolist() == pytest.approx(
        torch.sigmoid(-1.0 + 0.8 * shown).tolist(), abs=0.01
    )
    assert int(state[2]) == 3000
    assert rule.possible(state)


def test_it_follows_a_text_that_changes() -> None:
    """After five times its memory of texts where all is accepted, nothing is: a long memory still hopes."""
    margins = logistic(500, 0, 1)[0]
    predicted = {}
    for memory in (50, 5000):
        rule = Online("margin", memory=memory)
        state = rule.learn({"margin": margins}, torch.ones(500), rule.start())
        state = rule.learn({"margin": margins[:250]}, torch.zeros(250), state)
        predicted[memory] = float(rule.predict({"margin": torch.tensor(3.0)}, state))
    assert predicted[50] < 0.05 < 0.3 < predicted[5000]


@pytest.mark.parametrize("overlaps", [torch.zeros, torch.ones])
def test_verdicts_of_one_kind_leave_finite_weights(overlaps) -> None:  # type: ignore[no-untyped-def]
    rule = Online("margin+entropy+max_prob")
    sure = {"margin": torch.full((4000,), 80.0), "entropy": torch.zeros(4000), "max_prob": torch.ones(4000)}
    state = rule.learn(sure, overlaps(4000), rule.start())
    assert bool(state[0].isfinite().all()) and rule.possible(state)
    assert (
        abs(float(rule.predict({name: value[0] for name, value in sure.items()}, state)) - float(overlaps(1)))
        < 0.05
    )


def test_nobody_is_trusted_before_the_verdicts_are_in() -> None:
    rule = Online("margin", after=10, tau=0.0)
    state = rule.start()
    assert not bool(rule.trust({"margin": torch.tensor(80.0)}, state)[0])
    state = rule.learn({"margin": torch.ones(9)}, torch.ones(9), state)
    assert not bool(rule.trust({"margin": torch.tensor(80.0)}, state)[0])
    state = rule.learn({"margin": torch.ones(1)}, torch.ones(1), state)
    assert bool(rule.trust({"margin": torch.tensor(0.0)}, state)[0])


# --- when, and from which positions -----------------------------------------------------------------------------------
def test_each_drafted_token_is_judged_once_and_with_its_own_laws() -> None:
    rule = Notes("margin", after=4, tau=0.5)
    record = text(rule, tail=1)
    margins = torch.cat([margin for margin, _ in rule.taught])
    overlaps = torch.cat([beta for _, beta in rule.taught])
    known: dict[float, float] = {}
    ids = [0, *(token.id for token in record.tokens)]
    for end in range(1, len(ids) + 1):
        for last in ([], *([x] for x in range(4))):  # a rejected token may stand before a tail's
            prefix = (*ids[:end], *last)
            q = PAIR.q(prefix)
            first, second = q.topk(2).values.tolist()
            known[round(math.log(first / second), 9)] = float(overlap(PAIR.p(prefix), q))
    for margin, beta in zip(margins.tolist(), overlaps.tolist(), strict=True):
        assert beta == pytest.approx(known[round(margin, 9)], abs=1e-12)
    trusted = sum(token.origin == "trusted" for token in record.tokens)
    assert trusted > 5
    assert len(rule.taught) == record.stats.target_calls
    unscored = sum(
        token.drift is None for token in record.tokens
    )  # trusted last, with no target call after them
    assert len(margins) >= trusted - unscored + record.stats.checked


def test_verdicts_count_from_the_next_round_on() -> None:
    """With after=1 the first round trusts nobody, since its verdict comes at its end; the second one may."""
    record = text(Online(after=1, tau=0.0))
    rounds = {token.round for token in record.tokens if token.origin == "trusted"}
    assert min(rounds) == 2


def test_metering_every_token_changes_no_text() -> None:
    """A run of 100 trusted tokens: closing passes score them in parts, and the rule learns at the target call alone."""
    method = Method(trust=Online(after=1, tau=0.0), stop=Untrusted(), cap=100)
    found = []
    for complete in (False, True):
        record, draws = Record(), AddressedDraws(3)
        driver, loop = (
            ChainDriver(PAIR, draws),
            decode((0,), method, Limits(260), draws, record, complete),
        )
        request = next(loop, None)
        while request is not None:
            try:
                request = loop.send(driver.answer(request))
            except StopIteration:
                request = None
        found.append(record)
    assert found[1].stats.closing_passes > 1
    assert [token.id for token in found[0].tokens] == [token.id for token in found[1].tokens]
    states = [record.rules.to_dict()["trust"] for record in found if record.rules]
    assert states[0][2] == states[1][2] > 200
    assert states[0][0] == pytest.approx(states[1][0], abs=1e-12)


def test_the_state_goes_on_in_the_next_text() -> None:
    rule = Online(after=20, tau=0.3)
    first = text(rule)
    assert first.rules is not None
    kept = RuleState.begin(rule, Untrusted(), json.loads(json.dumps(first.rules.to_dict())))
    again, fresh = text(rule, 5, rules=kept), text(rule, 5)
    assert again.tokens[0].origin == "trusted"
    assert fresh.tokens[0].origin != "trusted"
    spoilt = first.rules.to_dict()
    spoilt["trust"][1][0][0] = -1.0
    with pytest.raises(UserError, match="not a state of the trust rule"):
        RuleState.begin(rule, Untrusted(), spoilt)


# --- laws -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tail", [0, 1])
def test_where_the_models_agree_the_law_is_theirs(tail: int) -> None:
    method = Method(trust=Online(after=1, tau=0.3), stop=Untrusted(tail), cap=3)
    for pair in (MarkovPair(3, seed=3, distance=0.0), MarkovPair(2, seed=1, distance=0.0)):
        for ahead in (1, 3):
            found = joint_law(method, pair, 3, ahead=ahead)
            check_same_law(found, target_joint_law(pair, 3), f"{method.trust}, tail {tail}")


def test_the_law_follows_the_decisions_that_the_verdicts_lead_to() -> None:
    """By hand, three tokens: the first is checked; then q where the weights it left predict tau or more, else p."""
    pair, rule = MarkovPair(2, seed=4), Online("margin", after=1, tau=0.55)

    def signals(prefix: tuple[int, ...]) -> dict[str, torch.Tensor]:
        first, second = pair.q(prefix).topk(2).values
        return {"margin": (first / second).log().reshape(1)}

    def taught(state: State, prefix: tuple[int, ...]) -> State:
        return rule.learn(signals(prefix), overlap(pair.p(prefix), pair.q(prefix)).reshape(1), state)

    wanted: dict[tuple[int, ...], float] = {}

    def run(
        prefix: tuple[int, ...], chance: float, state: State, waiting: tuple[tuple[int, ...], ...] = ()
    ) -> None:
        if len(prefix) == 4:
            wanted[prefix[1:]] = wanted.get(prefix[1:], 0.0) + chance
            return
        p, q = pair.p(prefix), pair.q(prefix)
        if bool(rule.trust(signals(prefix), state)[0]):
            for x in range(2):
                run((*prefix, x), chance * float(q[x]), state, (*waiting, prefix))
            return
        for one in (*waiting, prefix):
            state = taught(state, one)
        for x in range(2):
            kept = float(torch.minimum(p, q)[x])
            if len(prefix) == 3:
                run((*prefix, x), chance * kept, state)
            else:
                for y in range(2):
                    run((*prefix, x, y), chance * kept * float(pair.p((*prefix, x))[y]), state)
            run((*prefix, x), chance * (float(p[x]) - kept), state)

    run((0,), 1.0, rule.start())
    found = joint_law(Method(trust=rule, stop=Untrusted(), cap=20), pair, 3)
    check_same_law(found, wanted, f"{rule}")
    assert max(abs(found[text] - chance) for text, chance in target_joint_law(pair, 3).items()) > 1e-3


def test_a_gate_that_may_trust_at_once_keeps_the_rules_of_trust() -> None:
    """The suite checks the default, which begins with 16 verdicts."""
    check_trust(Online("margin+max_prob", after=1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("online(signal=marge)", "unknown signal of online 'marge': did you mean 'margin'?"),
        ("online(signal=margin+margin)", "did you mean 'margin'?"),
        ("online(tau=2)", r"tau=2 is out of range: give a number in \[0, 1\]"),
        ("online(after=0)", "after=0 is out of range: give a whole number >= 1"),
    ],
)
def test_what_is_out_of_range_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(spec)


def test_a_gate_is_recalibrated() -> None:
    """Before a verdict its score is the chance; a gate that says 0.9 where 0.3 is kept is corrected."""
    rule = Online("gate", memory=10_000)
    scores = torch.tensor([0.02, 0.5, 0.9], dtype=torch.float64)
    assert rule.needs == {"gate"}
    assert rule.predict({"gate": scores}, rule.start()).tolist() == pytest.approx(scores.tolist(), abs=1e-9)
    logits, overlaps = logistic(3000, -3.0, 1.0)
    state = rule.learn({"gate": torch.sigmoid(logits)}, overlaps, rule.start())
    wanted = torch.sigmoid(-3.0 + torch.logit(scores))
    assert rule.predict({"gate": scores}, state).tolist() == pytest.approx(wanted.tolist(), abs=0.02)
    check_trust(Online("gate", after=1))
    check_trust(Online("entropy+gate", after=1))
