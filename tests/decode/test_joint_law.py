"""Joint laws by enumeration of every draw through the real loop, to 1e-9."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.decode.chains import (
    EOS,
    Ends,
    Grows,
    LikelyToken,
    Remembers,
    Text,
    UnlikelyToken,
    Unsure,
    ends_at_eos,
    never_ends,
    oracle,
)

from sprinter.decode.accept import AcceptRule, Opt, RandomAccept, Typical
from sprinter.decode.conformance import check_same_law
from sprinter.decode.enumerate import MarkovPair, joint_law, target_joint_law
from sprinter.decode.spec import METHODS, Method, parse_method
from sprinter.decode.stop import Fixed, StopRule
from sprinter.decode.trust import Coin, Everyone, Gate

DENSE = MarkovPair(seed=11)
ZEROS = MarkovPair(seed=12, sharp=2.0, zeros=0.35)
SMALL = MarkovPair(seed=13, vocab=2)
# With several drafts and trees there are many more paths: tests/decode/test_several.py, test_trees.py.
LOSSLESS = [
    name for name in METHODS.names() if parse_method(name).lossless() and not parse_method(name).grows
]
AHEAD = [1, 2, 3, 16]


def check_lossless(
    method: Method,
    pair: MarkovPair,
    length: int,
    ahead: int = 1,
    ends: Ends = never_ends,
    prompt: Text = (0,),
) -> None:
    found = joint_law(method, pair, length, ahead=ahead, ends=ends, prompt=prompt)
    check_same_law(
        found, target_joint_law(pair, length, ends=ends, prompt=prompt), f"{method} on {pair}, ahead {ahead}"
    )


def test_supports_differ_where_zeros_are_asked_for() -> None:
    """The pair with zeros meets both kinds: tokens that only the target and that only the draft may say."""
    texts = [(0,), *((0, x) for x in range(3)), *((0, x, y) for x in range(3) for y in range(3))]
    p, q = [ZEROS.p(text) > 0 for text in texts], [ZEROS.q(text) > 0 for text in texts]
    assert any(bool((a & ~b).any()) for a, b in zip(p, q, strict=True))
    assert any(bool((b & ~a).any()) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("ahead", [1, 3])
def test_lossless_presets_write_the_targets_texts(name: str, ahead: int) -> None:
    check_lossless(parse_method(name), DENSE, 3, ahead)
    check_lossless(parse_method(name), ZEROS, 4, ahead, ends_at_eos, prompt=(1, EOS, 0))
    check_lossless(parse_method(f"{name}(cap=2)"), SMALL, 4, ahead)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("ahead", AHEAD)
def test_speculative_writes_the_targets_texts(gamma: int, ahead: int) -> None:
    method = Method(stop=Fixed(gamma))
    for length in (1, 2, 3, 4):
        check_lossless(method, SMALL, length, ahead)
    check_lossless(method, ZEROS, 4, ahead, ends_at_eos)
    check_lossless(method, ZEROS, 3, ahead, prompt=(2, 1, 0, 0))


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("ahead", [1, 3])
def test_copies_and_drafts_in_one_text_keep_the_targets_texts(length: int, ahead: int) -> None:
    drafter = f"lookup(n=1,least=1,otherwise=model,length={length})"
    for stop in ("svip(h=0.5)", "optimal(step=0.1,token=0)", "calibrated(rate=0.2)"):
        method = parse_method(f"drafter={drafter},stop={stop},cap=3")
        check_lossless(method, DENSE, 3, ahead)
        check_lossless(method, ZEROS, 4, ahead, ends_at_eos, prompt=(1, EOS, 0))
        check_lossless(method, SMALL, 5, ahead)


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_a_cap_keeps_the_targets_texts(cap: int) -> None:
    for ahead in (1, 16):
        check_lossless(Method(stop=Fixed(4), cap=cap), SMALL, 4, ahead)
        check_lossless(Method(stop=Fixed(4), cap=cap), ZEROS, 4, ahead, ends_at_eos)


@pytest.mark.parametrize("gamma", [1, 3])
def test_drafts_to_the_horizon_keep_the_targets_texts(gamma: int) -> None:
    """The last token is drafted too; no bonus follows it."""
    for ahead in (1, 16):
        check_lossless(Method(stop=Fixed(gamma), to_horizon=True), SMALL, 4, ahead)
        check_lossless(Method(stop=Fixed(gamma), to_horizon=True), ZEROS, 4, ahead, ends_at_eos)


@pytest.mark.parametrize("stop", [UnlikelyToken(), Unsure(), Unsure(1.0), Remembers(0.4), Grows()], ids=str)
@pytest.mark.parametrize("ahead", [1, 3])
def test_stop_rules_of_all_kinds_keep_the_targets_texts(stop: StopRule, ahead: int) -> None:
    check_lossless(Method(stop=stop), DENSE, 3, ahead)
    check_lossless(Method(stop=stop), ZEROS, 4, ahead, ends_at_eos)
    check_lossless(Method(stop=stop), SMALL, 4, ahead)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("cap", [1, 20])
def test_a_gate_that_never_trusts_writes_the_targets_texts(ahead: int, cap: int) -> None:
    """tau = 1 and scores below it: one token a run, checked."""
    method = parse_method(f"sprinter(tau=1.0, cap={cap})")
    check_lossless(method, SMALL, 4 if ahead < 3 else 3, ahead)
    check_lossless(method, ZEROS, 4, ahead, ends_at_eos)


TAUS = [0.0, 0.3, 0.5, 0.8, 1.0]


def gate_trust(pair: MarkovPair, tau: float) -> Callable[[Text, int], float]:
    return lambda text, x: float(pair.score("gate", text) >= tau)


def test_the_thresholds_tell_prefixes_apart() -> None:
    """At each threshold between 0 and 1 the pairs have prefixes that are trusted and others that are not."""
    for pair in (DENSE, ZEROS, SMALL):
        scores = [pair.score("gate", (0, *tail)) for tail in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]]
        for tau in TAUS[1:-1]:
            assert min(scores) < tau <= max(scores)


@pytest.mark.parametrize("tau", TAUS)
@pytest.mark.parametrize("cap", [1, 2, 3, None])
def test_a_gate_gives_the_drafts_law_where_it_trusts_and_the_targets_elsewhere(
    tau: float, cap: int | None
) -> None:
    """tau = 0 trusts all: the draft's law between the checks at the cap, which write the target's."""
    method = parse_method(f"sprinter(tau={tau}, cap={'none' if cap is None else cap})")
    for pair, length, ends in ((DENSE, 3, never_ends), (ZEROS, 4, ends_at_eos), (SMALL, 4, never_ends)):
        wanted, _ = oracle(pair, length, gate_trust(pair, tau), cap, ends=ends)
        assert sum(wanted.values()) == pytest.approx(1, abs=1e-12)
        for ahead in (1, 3) if tau < 1 and pair is not DENSE else (1,):
            found = joint_law(method, pair, length, ahead=ahead, ends=ends)
            check_same_law(found, wanted, f"{method.name} on {pair}, ahead {ahead}")


def test_runs_that_are_trusted_wholly_are_written_by_hand_too() -> None:
    """tau = 0, cap = 2: x1 ~ q; x2 checked; if it was kept x3 ~ p as a bonus, else x3 ~ q; x4 as it then falls."""
    pair, found = SMALL, joint_law(parse_method("sprinter(tau=0, cap=2)"), SMALL, 4)
    wanted: dict[Text, float] = {}
    for text in [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]:
        prefixes = [(0, *text[:i]) for i in range(4)]
        p = [float(pair.p(prefix)[x]) for prefix, x in zip(prefixes, text, strict=True)]
        q = [float(pair.q(prefix)[x]) for prefix, x in zip(prefixes, text, strict=True)]
        kept, replaced = min(p[1], q[1]), max(0.0, p[1] - q[1])
        # Kept: bonus at 3, a new run drafts 4, which ends the text and is trusted. Replaced: a run drafts 3 and 4.
        wanted[text] = q[0] * (kept * p[2] * q[3] + replaced * q[2] * q[3])
    check_same_law(found, wanted, "sprinter(tau=0, cap=2)")


def test_the_draft_alone_writes_the_drafts_texts() -> None:
    for pair, ends in ((DENSE, never_ends), (ZEROS, ends_at_eos)):
        wanted, _ = oracle(pair, 4, lambda text, x: 1.0, None, ends=ends)
        for ahead in AHEAD:
            check_same_law(
                joint_law(parse_method("draft-only"), pair, 4, ahead=ahead, ends=ends), wanted, "draft-only"
            )


@pytest.mark.parametrize(("rate", "cells"), [(0.5, 2), (0.25, 4), (0.0, 2), (1.0, 2)])
@pytest.mark.parametrize("cap", [2, 20])
def test_a_coin_mixes_both_laws(rate: float, cells: int, cap: int) -> None:
    method = parse_method(f"coin(rate={rate}, cap={cap})")
    for pair, length, ends in ((SMALL, 3, never_ends), (ZEROS, 3, ends_at_eos)):
        wanted, _ = oracle(pair, length, lambda text, x: rate, cap, ends=ends)
        for ahead in (1, 3) if cells == 2 else (1,):
            found = joint_law(method, pair, length, ahead=ahead, cells=cells, ends=ends)
            check_same_law(found, wanted, f"{method.name} on {pair}, ahead {ahead}")


def test_a_coin_of_one_half_on_a_longer_text() -> None:
    wanted, _ = oracle(SMALL, 4, lambda text, x: 0.5, 20)
    check_same_law(
        joint_law(Method(trust=Coin(0.5), stop=parse_method("coin").stop, cap=20), SMALL, 4), wanted, "coin"
    )


@pytest.mark.parametrize("accept", [Opt(0.2), RandomAccept(0.3), Typical()], ids=str)
def test_a_lossy_rule_writes_its_own_law_where_it_is_asked(accept: AcceptRule) -> None:
    method = Method(trust=Gate(0.5), stop=parse_method("sprinter").stop, accept=accept, cap=3)
    for pair, length, ends in ((DENSE, 3, never_ends), (ZEROS, 4, ends_at_eos)):
        wanted, _ = oracle(pair, length, gate_trust(pair, 0.5), 3, ends=ends, accept=accept)
        check_same_law(joint_law(method, pair, length, ends=ends), wanted, f"{accept}")


@pytest.mark.parametrize("ahead", [1, 3])
def test_trust_that_looks_at_the_token(ahead: int) -> None:
    """Whether the trust rule refuses an unlikely token or the stop rule sends it to the target, the law is the same."""
    for pair, length, ends in ((DENSE, 3, never_ends), (ZEROS, 4, ends_at_eos)):
        wanted, _ = oracle(
            pair, length, lambda text, x, pair=pair: float(pair.q(text)[x] >= 0.4), 3, ends=ends
        )
        untrusted = Method(trust=LikelyToken(0.4), stop=parse_method("sprinter").stop, cap=3)
        check_same_law(joint_law(untrusted, pair, length, ahead=ahead, ends=ends), wanted, "trust rule")

        def spared_or_likely(text: Text, x: int, pair=pair, length=length, ends=ends) -> float:
            """A token that ends the text escapes the stop rule's check."""
            return float(pair.q(text)[x] >= 0.4 or ends((*text, x)) is not None or len(text) == length)

        spared, _ = oracle(pair, length, spared_or_likely, 3, ends=ends)
        stopped = Method(trust=Everyone(), stop=UnlikelyToken(0.4), cap=3)
        check_same_law(joint_law(stopped, pair, length, ahead=ahead, ends=ends), spared, "stop rule")
