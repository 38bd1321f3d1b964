"""Lossy accept rules against the laws that their papers state."""

import functools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from sprinter.decode.accept import (
    Bild,
    Exact,
    Fuzzy,
    GreedyMatch,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    Typical,
    Uno,
)
from sprinter.decode.accept.fuzzy import DIVERGENCES
from sprinter.decode.conformance import law_pairs
from sprinter.decode.draft import Control
from sprinter.errors import UserError
from sprinter.laws import entropy, kl_divergence, overlap, tv_distance

PAIRS = list(law_pairs(10_000))
P, Q = torch.stack([p for p, _ in PAIRS]), torch.stack([q for _, q in PAIRS])
SLACKS = (0.0, 0.01, 0.1, 0.5, 1.0)
BUDGETS = (0.0, 0.001, 0.01, 0.1, 0.3, 1.0, 3.0)


@functools.cache
def kept(rule):
    """Keep chances b of all pairs; some rules take a second for them."""
    return rule.keep(P, Q)


@functools.cache
def law_of(rule):
    """π of all pairs."""
    return rule.law(P, Q)


def refusal(rule):
    """Chance of a refusal, Σ q·(1 − b)."""
    return 1 - (Q * kept(rule)).sum(-1)


def least_loss(rule):
    """Loss*_TV(b) = ½ Σ|p − b·q| − ½ Σ(1 − b)q: the least TV(π, p) over replacements (Yin et al. 2024, Theorem 4)."""
    b = kept(rule)
    return (P - b * Q).abs().sum(-1) / 2 - ((1 - b) * Q).sum(-1) / 2


@pytest.mark.parametrize("rule", [*map(Opt, SLACKS), *map(Mentored, BUDGETS)], ids=str)
def test_opt_and_mentored_lie_on_the_straight_line(rule):
    """Theorem 5: P(reject) + TV(π, p) = TV(p, q), and the replacement reaches Loss*."""
    drift = tv_distance(law_of(rule), P)
    torch.testing.assert_close(drift, least_loss(rule), rtol=0, atol=1e-12)
    torch.testing.assert_close(refusal(rule) + drift, tv_distance(P, Q), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "rule", [Uno(0.1), RandomAccept(0.5), Fuzzy("tv", 0.3), Typical(), Lenient(0.5)], ids=str
)
def test_no_rule_falls_below_the_line(rule):
    """Theorem 2 in its testable form, for any b: P(reject) + Loss*_TV(b) >= TV(p, q)."""
    above = refusal(rule) + tv_distance(law_of(rule), P) - tv_distance(P, Q)
    assert float(above.min()) >= -1e-12
    if not isinstance(rule, Lenient):
        assert float(above.mean()) > 0.01


@pytest.mark.parametrize("epsilon", SLACKS)
def test_uno_loses_at_least_what_opt_loses(epsilon):
    opt, uno = (tv_distance(law_of(rule), P) for rule in (Opt(epsilon), Uno(epsilon)))
    assert float((uno - opt).min()) >= -1e-12
    if 0 < epsilon < 1:
        assert float((uno - opt).max()) > 1e-3


def test_opts_replacement_is_the_papers_a():
    """Theorem 4 prints A = max(p − q, −ε)/Σ; its positive part is [p − q]₊."""
    epsilon, unequal = 0.05, tv_distance(P, Q) > 1e-9
    a = torch.maximum(P - Q, torch.full_like(P, -epsilon))[unequal].clamp(min=0)
    torch.testing.assert_close(
        Opt(epsilon).replacement(P, Q)[unequal], a / a.sum(-1, keepdim=True), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("budget", BUDGETS)
def test_mentored_keeps_its_budget_and_uses_it_up(budget):
    kl = kl_divergence(P, law_of(Mentored(budget)))
    assert float(kl.max()) <= budget + 1e-6
    # Everything is kept where KL(p‖q) <= D. Where p has mass outside q's support a budget above -m·ln(1e-9),
    # m that mass, cannot be used up: less would be refused than 1 − Σ q·b can carry in arithmetic.
    outside = torch.where(Q == 0, P, 0.0).sum(-1)
    attainable = (kl_divergence(P, Q) > budget) & (
        (outside == 0) | (outside * -math.log(1e-9) > 2 * budget + 0.1)
    )
    extreme = ((P > 0) & (P < 1e-200)).any(-1) | ((Q > 0) & (Q < 1e-200)).any(-1)
    tight = (kl - budget).abs() <= 1e-6
    assert bool(tight[attainable & ~extreme].all())
    assert int(attainable.sum()) > 2000


def test_mentored_reaches_the_budget_where_p_is_truncated():
    """As α → 0 a slack may be left; then tokens that the target forbids are kept with a chance c."""
    p = torch.tensor([0.6, 0.4, 0.0, 0.0], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    rule = Mentored(0.1)
    b = rule.keep(p, q)
    assert b[:2].tolist() == [1, 1]
    assert 0 < float(b[2]) < 1
    assert float(b[2]) == pytest.approx(float(b[3]))
    assert float(kl_divergence(p, rule.law(p, q))) == pytest.approx(0.1, abs=1e-9)


@pytest.mark.parametrize("budget", [0.01, 0.1, 0.5])
def test_mentored_clips_the_ratio_and_keeps_more_than_any_clip_that_obeys(budget):
    """p/π = clip(p/q, α, λ): constant below and above; and α a little smaller would break the budget."""
    p, q = P[50:60], Q[50:60]
    law = Mentored(budget).law(p, q)
    for one_p, one_q, one in zip(p, q, law, strict=True):
        if float(kl_divergence(one_p, one_q)) <= budget or float(one_p.min()) == 0 or float(one_q.min()) == 0:
            continue
        ratio, raw = one_p / one, one_p / one_q
        alpha, lam = float(ratio.min()), float(ratio.max())
        torch.testing.assert_close(ratio, raw.clamp(alpha, lam), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("w", [0.0, 0.3, 0.8, 1.0])
def test_lenient_draws_from_the_mixture(w):
    torch.testing.assert_close(Lenient(w).law(P, Q), w * P + (1 - w) * Q, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.25, 1.0])
def test_random_mixes_the_laws(rate):
    torch.testing.assert_close(RandomAccept(rate).law(P, Q), rate * Q + (1 - rate) * P, rtol=0, atol=1e-12)


def test_greedy_match_emits_the_targets_first_choice():
    law = GreedyMatch().law(P, Q)
    assert bool((law.amax(-1) > 1 - 1e-12).all())
    assert bool((law.argmax(-1) == P.argmax(-1)).all())


def test_typical_keeps_what_exceeds_both_thresholds():
    rule = Typical(0.09, 0.3)
    for p, q in PAIRS[:200]:
        threshold = min(0.09, 0.3 * math.exp(-float(entropy(p))))
        assert rule.keep(p, q).tolist() == [float(x > threshold) for x in p.tolist()]


def test_bild_judges_the_raw_law():
    p = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    raw = torch.tensor([0.9, 0.09, 0.01], dtype=torch.float64)
    assert Bild(3.0).keep(p, p, Control(raw, raw)).tolist() == [1, 1, 0]
    assert Bild(3.0).replacement(p, p).tolist() == [1, 0, 0]


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 3])
def test_fuzzy_is_q_below_the_threshold_and_p_above(divergence, top_k):
    rule = Fuzzy(divergence, 0.2, top_k)
    law, keep = rule.law(P, Q), rule.keep(P, Q)
    close = keep[:, 0] == 1
    assert bool(((keep == 1).all(-1) | (keep == 0).all(-1)).all())
    assert 500 < int(close.sum()) < len(P) - 500
    torch.testing.assert_close(law[close], Q[close], rtol=0, atol=1e-12)
    torch.testing.assert_close(law[~close], P[~close], rtol=0, atol=1e-12)
    if top_k == 0:
        assert torch.equal(close, DIVERGENCES[divergence](P, Q) < 0.2)


def test_fuzzys_divergences_are_what_their_names_say():
    p, q = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]], dtype=torch.float64)
    kl = float((p * (p / q).log()).sum())
    m = (p + q) / 2
    assert float(DIVERGENCES["kl"](p, q)) == pytest.approx(kl)
    assert float(DIVERGENCES["kl_reversed"](p, q)) == pytest.approx(float((q * (q / p).log()).sum()))
    assert float(DIVERGENCES["tv"](p, q)) == pytest.approx(0.6)
    reference = 0.5 * float((m * (m / p).log()).sum()) + 0.5 * float((m * (m / q).log()).sum())
    assert float(DIVERGENCES["js_reference"](p, q)) == pytest.approx(reference)
    assert float(DIVERGENCES["js"](P, Q).max()) <= math.log(2) + 1e-12
    assert float(DIVERGENCES["js_reference"](P, Q).max()) > math.log(2)


def test_fuzzy_compares_the_top_tokens_and_a_bucket_for_the_rest():
    p = torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64)
    q = torch.tensor([0.6, 0.2, 0.2, 0.0], dtype=torch.float64)
    assert Fuzzy("tv", 0.05).keep(p, q).tolist() == [0, 0, 0, 0]
    assert Fuzzy("tv", 0.05, top_k=2).keep(p, q).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_fuzzy_keeps_nothing_at_threshold_zero_however_close_the_laws(divergence, top_k):
    """In float32 a sum of p·ln(p/q) rounds to less than 0 where the laws are nearly equal."""
    chance = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, 8192, generator=chance)
    for distance in (0.0, 1e-5, 1e-4, 1e-3):
        p, q = (
            torch.softmax(logits + d * torch.randn(logits.shape, generator=chance), -1)
            for d in (0.0, distance)
        )
        assert float(DIVERGENCES[divergence](p, q).min()) >= 0
        rule = Fuzzy(divergence, 0.0, top_k=top_k)
        assert rule.lossless
        assert not rule.keep(p, q).any()


def test_fuzzy_decides_on_the_raw_laws():
    one = torch.tensor([1.0, 0.0], dtype=torch.float64)
    near = torch.tensor([0.55, 0.45], dtype=torch.float64)
    assert Fuzzy("tv", 0.2).keep(one, one.flip(-1), Control(near, near.flip(-1))).tolist() == [1, 1]


@pytest.mark.parametrize("rule", [Opt, Uno, Lenient, RandomAccept, Mentored, Typical, Bild])
def test_parameters_may_be_numbers_of_any_kind(rule):
    for given in (Fraction(1, 8), np.float32(0.125), np.float64(0.125)):
        assert repr(rule(given)) == repr(rule(0.125))
        assert torch.equal(rule(given).law(P[:4], Q[:4]), rule(0.125).law(P[:4], Q[:4]))


def test_lossless_ends_of_the_dials():
    """At the end of each dial that means no loss the rule is exact acceptance, or draws from p outright."""
    for rule in (Opt(0.0), Lenient(1.0), Mentored(0.0), Fuzzy("js", 0.0), RandomAccept(0.0)):
        assert rule.lossless
        torch.testing.assert_close(rule.law(P, Q), P, rtol=0, atol=1e-12)
    for rule in (Opt(0.0), Lenient(1.0), Mentored(0.0)):
        torch.testing.assert_close(1 - refusal(rule), overlap(P, Q), rtol=0, atol=1e-9)
        torch.testing.assert_close(rule.keep(P, Q), Exact().keep(P, Q), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Opt(-0.1), r"epsilon=-0.1 .* \[0, 1\]"),
        (lambda: Uno(2.0), "epsilon=2.0"),
        (lambda: Mentored(-1.0), "kl=-1.0"),
        (lambda: Lenient(1.5), "w=1.5"),
        (lambda: Typical(epsilon=7.0), "epsilon=7.0"),
        (lambda: Typical(delta=-1.0), "delta=-1.0"),
        (lambda: Bild(-1.0), "rollback=-1.0"),
        (lambda: RandomAccept(1.01), "rate=1.01"),
        (lambda: Fuzzy("jss"), "did you mean 'js'"),
        (lambda: Fuzzy(threshold=-1.0), "threshold=-1.0"),
        (lambda: Fuzzy(top_k=-1), "top_k=-1"),
        (lambda: Fuzzy(greedy_replacement=3), "greedy_replacement=3"),
    ],
)
def test_values_out_of_range(make, message):
    with pytest.raises(UserError, match=message):
        make()
