"""Trust by the draft's own certainty."""

from __future__ import annotations

import pytest
import torch

from sprinter.decode import Certain, Exact, Method, Untrusted, check_trust, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.enumerate import MarkovPair, joint_law
from sprinter.decode.signals import SIGNALS
from sprinter.decode.trust.certain import CERTAINTY
from sprinter.errors import UserError


def test_a_threshold_itself_is_certain_enough() -> None:
    values = torch.tensor([0.3, 0.7, 0.9], dtype=torch.float64)
    trusted = {
        ("entropy", 0.7): [True, True, False],
        ("max_prob", 0.7): [False, True, True],
        ("margin", 0.7): [False, True, True],
    }
    for (signal, threshold), wanted in trusted.items():
        rule = Certain(signal, threshold)
        for dtype in (torch.float32, torch.float64):
            decision, state = rule.trust({signal: values.to(dtype)}, ())
            assert decision.tolist() == wanted, rule
            assert state == ()


@pytest.mark.parametrize("signal", CERTAINTY)
def test_the_same_positions_are_trusted_whichever_signal_ranks_them(signal: str) -> None:
    """On two outcomes the three signals are functions of one another."""
    first = torch.linspace(0.5, 1.0, 21, dtype=torch.float64)
    laws = torch.stack([first, 1 - first], -1)
    at = 0.8 + 1e-3
    law = torch.tensor([at, 1 - at], dtype=torch.float64)
    edge = SIGNALS[signal](law, law)
    decision, _ = Certain(signal, float(edge)).trust({signal: SIGNALS[signal](laws, laws)}, ())
    assert decision.tolist() == (first >= at).tolist()


def test_another_signal_keeps_the_rules_of_trust() -> None:
    """The suite checks the default."""
    check_trust(Certain("max_prob"))


def test_trusted_positions_have_the_drafts_law_and_others_the_targets() -> None:
    """Two tokens: after a trusted one q, after an accepted one p (a bonus), after a replacement by rule again."""
    pair, rule = MarkovPair(2, 5), Certain("max_prob", 0.6)

    def own(text: tuple[int, ...]) -> torch.Tensor:
        q = pair.q(text)
        return q if float(q.max()) >= 0.6 else pair.p(text)

    found = joint_law(Method(trust=rule, stop=Untrusted(), accept=Exact(), cap=20), pair, 2)
    wanted: dict[tuple[int, ...], float] = {}
    first_q, first_p = pair.q((0,)), pair.p((0,))
    trusted = float(first_q.max()) >= 0.6
    for x in range(2):
        for y in range(2):
            after = own((0, x))
            if trusted:
                chance = float(first_q[x] * after[y])
            else:  # accepted: a bonus follows, drawn from p; replaced: a new run
                kept = float(torch.minimum(first_p, first_q)[x])
                chance = kept * float(pair.p((0, x))[y]) + (float(first_p[x]) - kept) * float(after[y])
            wanted[x, y] = chance
    check_same_law(found, wanted, f"{rule}")


def test_the_default_threshold_is_a_number_in_results() -> None:
    method = parse_method("certain").settle({})
    assert method.name == "certain(signal=entropy, threshold=0.3, cap=20, tail=0)"
    assert method.trust == Certain("entropy", CERTAINTY["entropy"].default)
    composed = parse_method("trust=certain(signal=margin),stop=untrusted").settle({})
    assert f"threshold={CERTAINTY['margin'].default:g}" in composed.name
    assert parse_method(composed.name).trust == composed.trust


def test_a_threshold_is_no_count() -> None:
    """A whole number, as any other: parameters that are counts are bounded by the row."""
    parse_method("certain(threshold=100000)").check_counts(100, "so")
    parse_method("trust=online(tau=0.9),stop=untrusted").check_counts(500, "so")
    with pytest.raises(UserError, match="cap=200 is more than so: give at most 100"):
        parse_method("certain(threshold=100000, cap=200)").check_counts(100, "so")


def test_signals_are_of_the_raw_law() -> None:
    for signal in CERTAINTY:
        assert parse_method(f"certain(signal={signal})").needs == {signal}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("certain(threshold=measured)", "threshold=measured is not a number: give one, or 'default'"),
        ("certain(signal=entrop)", "unknown signal of certain 'entrop': did you mean 'entropy'?"),
        ("certain(threshold=-1)", r"threshold=-1 is out of range: give a number in \[0, 1e\+06\]"),
        ("certain(signal=max_prob, threshold=3)", r"threshold=3 is out of range: give a number in \[0, 1\]"),
        ("certain(threshold=recorded)", "threshold=recorded is not a number"),
    ],
)
def test_what_is_out_of_range_is_refused(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(spec)
