"""Drift: what the meter reports is what its definition says, and its mean is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.decode.chains import (
    Ends,
    LikelyToken,
    Text,
    UnlikelyToken,
    ends_at_eos,
    ids,
    listen,
    never_ends,
    oracle,
    paths,
)

from sprinter.decode.accept import (
    AcceptRule,
    Batch,
    Bild,
    Exact,
    Fuzzy,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    Typical,
    Uno,
)
from sprinter.decode.draft import Control, Origin, Scores, Token
from sprinter.decode.enumerate import MarkovPair
from sprinter.decode.loop import METER_CHUNK, Limits
from sprinter.decode.meter import Meter
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Fixed, Untrusted
from sprinter.decode.trust import Coin, Everyone, Gate, TrustRule
from sprinter.laws import tv_distance

DENSE = MarkovPair(seed=21)
ZEROS = MarkovPair(seed=22, sharp=1.5, zeros=0.3)
METHODS = [
    "sprinter",
    "sprinter(tau=0.8, cap=2)",
    "sprinter(tau=0, cap=3)",
    "coin",
    "draft-only",
    "speculative",
]


def expected_drift(method: Method, pair: MarkovPair, length: int, ends: Ends) -> float:
    """Mean over all paths of the sum of drifts that the complete meter reports."""
    return sum(
        weight * sum(token.drift for token in record.tokens if token.drift is not None)
        for weight, record in paths(method, pair, length, ends=ends, complete=True)
    )


# --- each token ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("complete", [False, True])
def test_every_path_reports_the_defined_drift(spec: str, complete: bool) -> None:
    """Trusted: TV(q, p) at that prefix, once scored. From the target, or kept by exact acceptance: 0."""
    method = parse_method(spec)
    for _, record in paths(method, DENSE, 3, complete=complete):
        last_call = max(
            (i for i, token in enumerate(record.tokens) if token.origin != Origin.TRUSTED), default=-1
        )
        for i, token in enumerate(record.tokens):
            prefix = (0, *ids(record)[:i])
            if token.origin != Origin.TRUSTED:
                assert token.drift == 0.0
            elif complete or i < last_call:
                assert token.drift == pytest.approx(
                    float(tv_distance(DENSE.q(prefix), DENSE.p(prefix))), abs=1e-14
                )
            else:
                assert token.drift is None
        scored = [token.drift for token in record.tokens if token.drift is not None]
        assert record.stats.drift_coverage == len(scored) / 3
        assert record.stats.mean_drift == (pytest.approx(sum(scored) / len(scored)) if scored else None)


def test_nothing_scored_is_none_and_not_zero() -> None:
    record, exchange = listen(parse_method("draft-only"), DENSE, Limits(5))
    assert record.stats.mean_drift is None
    assert record.stats.drift_coverage == 0.0
    assert exchange.scores == []


# --- the mean --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tau", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("cap", [1, 3])
@pytest.mark.parametrize("ends", [never_ends, ends_at_eos])
def test_the_mean_is_the_expected_total_variation(tau: float, cap: int, ends: Ends) -> None:
    """E[sum of drifts] = E[sum of TV(π, p)], π by recursion; also where EOS escapes the check at the cap."""
    method = Method(trust=Gate(tau), stop=Untrusted(), cap=cap)
    for pair, length in ((DENSE, 3), (ZEROS, 4)) if tau < 1 else ((ZEROS, 3),):
        _, wanted = oracle(
            pair, length, lambda text, x, pair=pair: float(pair.score("gate", text) >= tau), cap, ends=ends
        )
        assert expected_drift(method, pair, length, ends) == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("accept", [Opt(0.2), RandomAccept(0.3), Typical()], ids=str)
def test_the_mean_of_a_lossy_rule(accept: AcceptRule) -> None:
    """TV(π, p) of the rule where it judged, TV(q, p) where the gate trusted, 0 for a bonus."""
    method = Method(trust=Gate(0.5), stop=Untrusted(), accept=accept, cap=3)
    for pair in (DENSE, ZEROS):

        def trust(text: Text, x: int, pair: MarkovPair = pair) -> float:
            return float(pair.score("gate", text) >= 0.5)

        _, wanted = oracle(pair, 3, trust, 3, accept=accept)
        assert wanted > 0.05
        assert expected_drift(method, pair, 3, never_ends) == pytest.approx(wanted, abs=1e-9)


def test_the_mean_of_a_coin() -> None:
    for rate, cells in ((0.5, 2), (0.25, 4)):
        _, wanted = oracle(ZEROS, 3, lambda text, x, rate=rate: rate, 2)
        found = sum(
            weight * sum(token.drift for token in record.tokens)
            for weight, record in paths(
                parse_method(f"coin(rate={rate}, cap=2)"), ZEROS, 3, cells=cells, complete=True
            )
        )
        assert found == pytest.approx(wanted, abs=1e-9)


def likely(pair: MarkovPair, c: float, length: int, ends: Ends, spare: bool) -> Callable[[Text, int], float]:
    """Trust of tokens with q >= c, and, with ``spare``, of those that end the text."""

    def trust(text: Text, x: int) -> float:
        over = len(text) == length or ends((*text, x)) is not None
        return float(pair.q(text)[x] >= c or (spare and over))

    return trust


@pytest.mark.parametrize("c", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("ends", [never_ends, ends_at_eos])
def test_the_one_sample_form_is_unbiased_where_trust_looks_at_the_token(c: float, ends: Ends) -> None:
    """max(0, 1 - p(x)/q(x)) of the trusted tokens, whether the trust rule or the stop rule depends on x."""
    for pair, length in ((DENSE, 3), (ZEROS, 4)):
        _, wanted = oracle(pair, length, likely(pair, c, length, ends, spare=False), 3, ends=ends)
        by_trust = Method(trust=LikelyToken(c), stop=Untrusted(), cap=3)
        assert expected_drift(by_trust, pair, length, ends) == pytest.approx(wanted, abs=1e-9)
        _, wanted = oracle(pair, length, likely(pair, c, length, ends, spare=True), 3, ends=ends)
        by_stop = Method(trust=Everyone(), stop=UnlikelyToken(c), cap=3)
        assert expected_drift(by_stop, pair, length, ends) == pytest.approx(wanted, abs=1e-9)


RULES = [
    Exact(), RandomAccept(0.0), RandomAccept(0.3), Fuzzy("js", 0.05), Typical(), Bild(1.0), Lenient(0.5), Opt(0.1),
    Uno(0.1), Mentored(0.05),
]  # fmt: skip


@pytest.mark.parametrize("accept", RULES, ids=str)
@pytest.mark.parametrize("trust", [Gate(0.0), Coin(0.5), LikelyToken(0.5)], ids=str)
def test_the_mean_is_never_less_than_the_drift_where_x_decides_what_is_checked(
    trust: TrustRule, accept: AcceptRule
) -> None:
    """A token at the cap that ends the text, or a rule that depends on x: a bound, which exact acceptance attains."""
    gap = 0.0
    for seed in range(6):
        pair = MarkovPair(2, seed, sharp=2.0)

        def ends(text: Text) -> str | None:
            return "eos" if text[-1] == 0 else None

        def chance(text: Text, x: int, pair: MarkovPair = pair) -> float:
            rate = trust.rate if isinstance(trust, Coin) else 1.0
            return float(pair.q(text)[x] >= 0.5) if trust.sees_token else rate

        method = Method(trust=trust, stop=Untrusted(), accept=accept, cap=1)
        found = expected_drift(method, pair, 2, ends)
        law, wanted = oracle(pair, 2, chance, 1, ends=ends, accept=accept)
        target, _ = oracle(pair, 2, lambda text, x: 0.0, 1, ends=ends)
        texts = law.keys() | target.keys()
        distance = sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in texts) / 2
        assert distance <= wanted + 1e-12
        assert found >= wanted - 1e-12
        gap = max(gap, found - wanted)
    if isinstance(accept, Exact):
        assert gap < 1e-12


def test_a_rule_for_several_drafts_is_metered_as_the_exact_one_that_it_is_of_a_single_draft() -> None:
    exact, batch = (
        Method(trust=LikelyToken(0.4), stop=Untrusted(), accept=accept, cap=2)
        for accept in (Exact(), Batch())
    )
    assert expected_drift(batch, DENSE, 2, never_ends) == pytest.approx(
        expected_drift(exact, DENSE, 2, never_ends)
    )


def test_the_total_variation_form_would_be_biased_there() -> None:
    """Why a rule must declare ``sees_token``: metered without it, the mean is wrong."""

    class Silent(LikelyToken):
        sees_token = False

    _, wanted = oracle(DENSE, 3, likely(DENSE, 0.4, 3, never_ends, spare=False), 3)
    found = expected_drift(Method(trust=Silent(0.4), stop=Untrusted(), cap=3), DENSE, 3, never_ends)
    assert abs(found - wanted) > 0.01


def test_the_expected_sum_bounds_the_distance_of_whole_texts() -> None:
    for tau in (0.0, 0.3, 0.6):
        law, drift = oracle(DENSE, 3, lambda text, x, tau=tau: float(DENSE.score("gate", text) >= tau), 20)
        target, _ = oracle(DENSE, 3, lambda text, x: 0.0, 20)
        distance = (
            sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2
        )
        found = expected_drift(parse_method(f"sprinter(tau={tau})"), DENSE, 3, never_ends)
        assert found == pytest.approx(drift, abs=1e-9)
        assert distance <= found + 1e-12


# --- closing passes --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 150])
@pytest.mark.parametrize("ahead", [1, 16])
@pytest.mark.parametrize("spec", ["draft-only", "sprinter(tau=0, cap=none)", "sprinter(tau=0, cap=100)"])
def test_a_complete_meter_scores_every_token(length: int, ahead: int, spec: str) -> None:
    """Long runs of trusted tokens too; passes are counted apart, and each reads on where the last one ended."""
    pair = MarkovPair(seed=23, vocab=2)
    record, exchange = listen(parse_method(spec), pair, Limits(length), ahead=ahead, complete=True)
    plain, _ = listen(parse_method(spec), pair, Limits(length), ahead=ahead)
    assert ids(record) == ids(plain)
    assert record.stats.drift_coverage == 1.0
    for i, token in enumerate(record.tokens):
        prefix = (0, *ids(record)[:i])
        wanted = float(tv_distance(pair.q(prefix), pair.p(prefix))) if token.origin == Origin.TRUSTED else 0.0
        assert token.drift == pytest.approx(wanted, abs=1e-14)
    closing = [ask for ask in exchange.scores if ask.closing]
    assert record.stats.closing_passes == len(closing)
    assert record.stats.target_calls == len(exchange.scores) - len(closing) == plain.stats.target_calls
    assert max(len(ask.tokens) for ask in closing) < METER_CHUNK + ahead
    if spec == "draft-only":
        read = 0
        for ask in closing:
            assert ask.start == read
            read += len(ask.tokens)
        assert read == length  # the prompt's token and all but the last new one


def test_a_complete_meter_adds_no_pass_where_nothing_waits() -> None:
    for spec in ("speculative", "autoregressive", "sprinter(tau=1.0)"):
        record, _ = listen(parse_method(spec), DENSE, Limits(9), complete=True)
        assert record.stats.closing_passes == 0
        assert record.stats.drift_coverage == 1.0
        assert record.stats.mean_drift == 0.0


def test_a_complete_meter_adds_one_pass_after_the_last_call() -> None:
    record, exchange = listen(Method(trust=Everyone(), stop=Fixed(3)), DENSE, Limits(9), complete=True)
    trusted_tail = (
        len(ids(record)) - 1 - max(i for i, t in enumerate(record.tokens) if t.origin != Origin.TRUSTED)
    )
    assert trusted_tail > 0
    assert record.stats.closing_passes == 1
    assert exchange.scores[-1].closing
    assert len(exchange.scores[-1].tokens) == trusted_tail


# --- the meter by itself ---------------------------------------------------------------------------------------------
def test_the_meter_finds_its_rows() -> None:
    p = torch.tensor([[0.2, 0.8], [0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([0.6, 0.4], dtype=torch.float64)
    meter, tokens = Meter(), [Token(x, Origin.TRUSTED, 1) for x in (0, 1, 1)]
    meter.wait(11, tokens[0], q)
    meter.wait(12, tokens[1], q, saw_token=True)
    meter.wait(13, tokens[2], q, saw_token=True)
    assert len(meter.waiting) == 3
    meter.score(10, Scores(p))
    assert [token.drift for token in tokens] == pytest.approx([0.4, 0.0, 1.0])
    assert meter.waiting == []
    meter.score(10, Scores(torch.ones(3, 2) / 2))
    assert tokens[0].drift == pytest.approx(0.4)


def test_the_meter_asks_the_accept_rule_about_a_token_that_x_spared() -> None:
    """TV(π₀, p) + 1 − K₀(x), decided on the raw laws where the rule reads them."""
    rule = Fuzzy("tv", 0.5)
    p, q = (torch.tensor(law, dtype=torch.float64) for law in ([0.2, 0.8], [0.6, 0.4]))
    far, near = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.3, 0.7], dtype=torch.float64)
    for raw_q, wanted in ((far, 0.8), (near, 0.4)):  # 1 - p(x), as p may draw x again; π₀ = q
        meter, token = Meter(rule), Token(0, Origin.TRUSTED, 1)
        meter.wait(11, token, q, saw_token=True, raw_q=raw_q)
        meter.score(10, Scores(p[None], p[None]))
        assert token.drift == pytest.approx(wanted)
        assert wanted == pytest.approx(float(rule.drift(p, q, Control(p, raw_q))) + 0.8 * (raw_q is far))
