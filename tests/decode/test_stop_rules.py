"""Stop rules with state against sequences computed by hand; rules that read the draft's certainty."""

import math

import pytest
import torch

from sprinter.decode.conformance import check_same_law
from sprinter.decode.enumerate import MarkovPair, joint_law, target_joint_law
from sprinter.decode.rule_conformance import check_stop
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import AdaEdl, BildFallback, Confidence, Fixed, Heuristic, SpecDec, Svip, Untrusted
from sprinter.decode.trust import Gate
from sprinter.errors import UserError


def signal(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_heuristic_follows_success():
    """5 → all of 5 kept: 7 → 3 of 7: 6 → 0 of 6: 5 → 4 → 3 → 2 → 1 → 1 (never 0) → all of 1: 3."""
    rule = Heuristic(5)
    state, seen = rule.start(), [5]
    for drafted, accepted in [(5, 5), (7, 3), (6, 0), (5, 0), (4, 0), (3, 0), (2, 0), (1, 0), (1, 1)]:
        state = rule.end_round(state, drafted, drafted, accepted)
        seen.append(int(state[0]))
    assert seen == [5, 7, 6, 5, 4, 3, 2, 1, 1, 3]
    assert not bool(rule.stop(signal(drafted=2), state)[0])
    assert bool(rule.stop(signal(drafted=3), state)[0])


def test_heuristic_stays_within_its_bound_and_ignores_rounds_without_a_check():
    rule = Heuristic(4, longest=6)
    state = rule.end_round(rule.start(), 4, 4, 4)
    state = rule.end_round(state, 6, 6, 6)
    assert int(state[0]) == 6
    assert int(rule.end_round(state, 3, 0, 0)[0]) == 6


def test_the_rule_of_a_tail_counts_the_tail():
    rule = Untrusted(tail=9, under=Fixed(2))
    state, stops = rule.begin_round(rule.start()), []
    for drafted, trusted in enumerate((True, True, False, False), start=1):
        signals = {"trusted": torch.tensor(trusted), "drafted": torch.tensor(drafted)}
        stop, state = rule.stop(signals, state)
        stops.append(bool(stop))
    assert stops == [False, False, False, True]


def test_adaedl_follows_the_acceptance_rate():
    """g = 0.2, α = 0.9, β1 = 0.5, β2 = 0.9, ε = 0.01, λ0 = 0.5, γ_max = 4, computed by hand.

    round 1: 1 of 4: AR = 0.45 + 0.125 = 0.575 < α, λ' = 0.51, λ = 0.45 + 0.051 = 0.501
    round 2: 4 of 4: AR = 0.2875 + 0.5 = 0.7875 < α, λ' = 0.511, λ = 0.4509 + 0.0511 = 0.502
    round 3: 4 of 4: AR = 0.39375 + 0.5 = 0.89375 < α, λ' = 0.512, λ = 0.4518 + 0.0512 = 0.503
    round 4: 4 of 4: AR = 0.446875 + 0.5 = 0.946875 >= α, all of γ_max: λ' = λ, stays 0.503
    round 5: 2 of 2: AR = 0.4734375 + 0.5 >= α, not γ_max: λ' = 0.493, λ = 0.4527 + 0.0493 = 0.502
    round 6: nothing drafted: nothing changes
    """
    rule = AdaEdl(longest=4)
    state, seen = rule.start(), []
    for drafted, accepted in [(4, 1), (4, 4), (4, 4), (4, 4), (2, 2), (0, 0)]:
        state = rule.end_round(state, drafted, drafted, accepted)
        seen.append((round(float(state[0]), 9), round(float(state[1]), 9)))
    assert seen == [
        (0.501, 0.575), (0.502, 0.7875), (0.503, 0.89375), (0.503, 0.946875), (0.502, 0.97343750), (0.502, 0.97343750),
    ]  # fmt: skip


def test_adaedl_stops_where_the_bound_falls_below_lambda():
    rule = AdaEdl()
    edge = (1 - 0.5) ** 2 / 0.2  # 1 − sqrt(gH) = λ
    state = rule.start()
    assert not bool(rule.stop(signal(entropy=edge - 1e-3, drafted=1), state)[0])
    assert bool(rule.stop(signal(entropy=edge + 1e-3, drafted=1), state)[0])
    assert bool(rule.stop(signal(entropy=0.0, drafted=40), state)[0])


def test_svip_stops_above_its_threshold():
    rule, edge = Svip(h=0.3, c=0.15), 0.09 / 0.15
    assert not bool(rule.stop(signal(entropy=edge - 1e-3), ())[0])
    assert bool(rule.stop(signal(entropy=edge + 1e-3), ())[0])
    assert Svip(h=0.0).stop(signal(entropy=1e-6), ())[0]


@pytest.mark.parametrize("law", ["raw", "processed"])
def test_rules_read_the_law_that_they_are_told_to(law):
    ending = "" if law == "raw" else "_processed"
    assert Confidence(law=law).needs == {f"token_prob{ending}"}
    assert BildFallback(law=law).needs == {f"max_prob{ending}"}
    assert Svip(law=law).needs == AdaEdl(law=law).needs == {f"entropy{ending}"}
    assert Confidence(0.4, law).stop(signal(**{f"token_prob{ending}": 0.39}), ())[0]
    assert not BildFallback(0.6, law).stop(signal(**{f"max_prob{ending}": 0.61}), ())[0]


def test_state_is_reset_between_sequences():
    """The same method on a second text starts as on the first: no state lives in the rule."""
    method, pair = parse_method("heuristic(start=2)"), MarkovPair(seed=9)
    assert joint_law(method, pair, 3) == joint_law(method, pair, 3)


@pytest.mark.parametrize(
    "rule", [Untrusted(1), Untrusted(3), Untrusted(4, Svip(0.35)), Untrusted(2, Fixed(2))], ids=str
)
def test_tails_keep_the_targets_law_for_what_is_not_trusted(rule):
    check_stop(rule)


def test_a_tail_counts_from_the_first_refusal():
    rule = Untrusted(tail=2)
    state, stops = rule.begin_round(rule.start()), []
    for trusted in (
        True,
        False,
        True,
        True,
    ):  # tokens after the first untrusted one are untrusted, whichever decision the rule makes
        stop, state = rule.stop({"trusted": torch.tensor(trusted)}, state)
        stops.append(bool(stop))
    assert stops == [False, False, False, True]


def test_a_tail_under_a_gate_with_equal_laws_is_the_target():
    pair = MarkovPair(seed=12, distance=0.0)
    method = Method(trust=Gate(0.5), stop=Untrusted(2), cap=4)
    check_same_law(joint_law(method, pair, 3), target_joint_law(pair, 3), "tail under a gate, p = q")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Heuristic(0), "first=0"),
        (lambda: Confidence(1.5), r"c=1.5 .* \[0, 1\]"),
        (lambda: Confidence(law="row"), "law=row is unknown"),
        (lambda: BildFallback(-0.1), "f=-0.1"),
        (lambda: Svip(h=-1.0), "h=-1.0"),
        (lambda: Svip(c=math.nan), "c=nan"),
        (lambda: AdaEdl(alpha=2.0), "alpha=2.0"),
        (lambda: AdaEdl(longest=0), "longest=0"),
        (lambda: Untrusted(-1), "tail=-1"),
        (lambda: Untrusted(1, BildFallback()), "cannot end a tail"),
    ],
)
def test_values_out_of_range(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_the_rule_of_a_tail_sees_the_tail_alone():
    """SpecDec++'s product is of the untrusted tokens: four trusted ones of chance 0.5 do not count."""
    rule = Untrusted(tail=5, under=SpecDec(0.7, least=1))
    state, stops = rule.begin_round(rule.start()), []
    for drafted, (trusted, chance) in enumerate(
        [(True, 0.5)] * 4 + [(False, 0.95), (False, 0.5), (True, 0.5)], 1
    ):
        signals = {"trusted": trusted, "specdec++": chance, "drafted": drafted}
        stop, state = rule.stop({name: torch.tensor(value) for name, value in signals.items()}, state)
        stops.append(bool(stop))
    assert stops == [False] * 6 + [True]  # 1 - 0.95 * 0.5 * 0.5 = 0.76
