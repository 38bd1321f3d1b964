"""Theorems 1 and 3 on Markov chains: the real loop enumerated and by Monte Carlo, drafts to the horizon and short."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.decode.chains import law_of, paths
from tests.theory.oracles import rule_on_chain
from tests.theory.tools import INSTANCES, ChainPair, chains, check_family, expected, from_zero, mean_of

from sprinter.decode.accept import Batch, Exact, Fuzzy, Mentored, Opt, RandomAccept, Uno
from sprinter.decode.draft import Origin, Record
from sprinter.decode.drafter import Model
from sprinter.decode.enumerate import target_joint_law
from sprinter.decode.spec import Method
from sprinter.decode.stop import Fixed
from sprinter.errors import UserError
from sprinter.theory.chains import (
    MarkovChain,
    batch_rejections,
    expected_rejections,
    mean_overlap,
    rejections_by_position,
    speculative_counts,
)
from sprinter.theory.montecarlo import Estimate, estimate, simulate


def to_horizon(horizon: int, drafts: int = 1) -> Method:
    accept = Batch() if drafts > 1 else Exact()
    return Method(stop=Fixed(horizon), accept=accept, drafter=Model(drafts=drafts), to_horizon=True)


def rejections(record: Record) -> int:
    return sum(token.origin is Origin.REPLACEMENT for token in record.tokens)


# --- enumeration -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("states", "horizon"), [(2, 3), (3, 2)])
def test_theorem_1_in_the_enumerated_loop(states: int, horizon: int) -> None:
    for seed in range(3):
        chain = from_zero(MarkovChain.random(states, horizon, seed))
        found = expected(to_horizon(horizon), chain, rejections)
        assert found == pytest.approx(expected_rejections(chain), abs=1e-10)
        counts = speculative_counts(chain, horizon, to_horizon=True)
        assert counts.rejections == pytest.approx(found, abs=1e-10)
        calls = expected(to_horizon(horizon), chain, lambda record: record.stats.target_calls)
        assert calls == pytest.approx(counts.target_calls, abs=1e-10)
        last = float(rejections_by_position(chain)[-1])
        assert calls == pytest.approx(found + 1 - last, abs=1e-10)


@pytest.mark.parametrize(("states", "horizon"), [pytest.param(2, 3, marks=pytest.mark.slow), (3, 2)])
def test_theorem_3_in_the_enumerated_loop(states: int, horizon: int) -> None:
    chain = from_zero(MarkovChain.random(states, horizon, seed=4))
    found = expected(to_horizon(horizon, drafts=2), chain, rejections)
    assert found == pytest.approx(batch_rejections(chain, 2), abs=1e-10)
    assert batch_rejections(chain, 1) == pytest.approx(expected_rejections(chain), abs=1e-12)


@pytest.mark.parametrize(("gamma", "drafts_last"), [(1, False), (2, False), (2, True)])
def test_short_drafts_in_the_enumerated_loop(gamma: int, drafts_last: bool) -> None:
    chain = from_zero(MarkovChain.random(2, 4, seed=6))
    method = Method(stop=Fixed(gamma), to_horizon=drafts_last)
    counts = speculative_counts(chain, gamma, drafts_last)
    every = list(paths(method, ChainPair(chain), 4))
    found = [mean_of(every, rejections), mean_of(every, lambda r: r.stats.target_calls)]
    assert found == pytest.approx(list(counts), abs=1e-10)


@pytest.mark.parametrize(
    "rule", [Opt(0.1), Uno(0.2), RandomAccept(0.5), Mentored(0.1), Fuzzy("tv", 0.3)], ids=str
)
def test_lossy_rules_in_the_enumerated_loop(rule: Opt) -> None:
    """Rejections, drift, and the divergences of whole texts, from the joint laws."""
    chain = from_zero(MarkovChain.random(2, 3, seed=1))
    method = Method(stop=Fixed(3), accept=rule, to_horizon=True)
    on = rule_on_chain(chain, rule)
    every = list(paths(method, ChainPair(chain), 3))
    assert mean_of(every, rejections) == pytest.approx(on.rejections, abs=1e-10)
    drift = mean_of(every, lambda record: sum(token.drift or 0.0 for token in record.tokens))
    assert drift == pytest.approx(on.drift, abs=1e-10)
    own, target = law_of(every), target_joint_law(ChainPair(chain), 3)  # type: ignore[arg-type]
    kl = sum(p * math.log(p / own[text]) for text, p in target.items())
    reversed_ = sum(p * math.log(p / target[text]) for text, p in own.items() if p > 0)
    assert (kl, reversed_) == pytest.approx((on.kl, on.kl_reversed), abs=1e-10)
    tv = sum(abs(own.get(text, 0.0) - target.get(text, 0.0)) for text in own.keys() | target.keys()) / 2
    assert tv <= on.drift + 1e-12


def test_recursion_22_against_texts_written_out() -> None:
    """f(x_1:n) as the paper writes it, over every text, without the chain's shortcut."""
    from sprinter.laws import tv_distance
    from sprinter.theory.front import batch_laws

    chain, drafts = MarkovChain.random(3, 3, seed=2), 3
    refused, last = batch_laws(chain.p, chain.q, drafts)
    total = 0.0
    for s in range(3):
        f = {(s,): float(chain.start[s])}
        p_of = dict(f)
        for n in range(3):
            for text, weight in f.items():
                tv = float(tv_distance(chain.p[n, text[-1]], chain.q[n, text[-1]]))
                total += p_of[text] * tv - weight * (tv - float(refused[n, text[-1]]))
            f, p_of = (
                {
                    (*text, x): float(
                        (chain.p[n, text[-1], x] - chain.q[n, text[-1], x]).clamp(min=0)
                        * (p_of[text] - f[text])
                        + refused[n, text[-1]] * last[n, text[-1], x] * f[text]
                    )
                    for text, x in itertools.product(f, range(3))
                },
                {
                    (*text, x): p_of[text] * float(chain.p[n, text[-1], x])
                    for text, x in itertools.product(f, range(3))
                },
            )
    assert batch_rejections(chain, drafts) == pytest.approx(total, abs=1e-10)


# --- Monte Carlo through the real loop -------------------------------------------------------------------------------
@pytest.mark.statistical
def test_theorem_1_by_monte_carlo() -> None:
    """20 chains, 120 texts each, drafts to the horizon: rejections and target calls; false-alarm rate 0.1 % each."""
    found, calls, truths = [], [], []
    for i, chain in enumerate(chains(INSTANCES, 3, 8, seed=1)):
        run = simulate(chain, to_horizon(8), 120, seed=i)
        found.append(estimate(run.rejections))
        calls.append(estimate(run.target_calls))
        truths.append(chain)
    check_family(found, [expected_rejections(chain) for chain in truths])
    check_family(calls, [speculative_counts(chain, 8, True).target_calls for chain in truths])


@pytest.mark.statistical
def test_theorem_3_by_monte_carlo() -> None:
    """20 chains, 100 texts each, batches of 2 to 4 drafts to the horizon; false-alarm rate 0.1 %."""
    found, truths = [], []
    for i, chain in enumerate(chains(INSTANCES, 4, 6, seed=2)):
        drafts = 2 + i % 3
        found.append(estimate(simulate(chain, to_horizon(6, drafts), 100, seed=i).rejections))
        truths.append(batch_rejections(chain, drafts))
    check_family(found, truths)


@pytest.mark.statistical
def test_short_drafts_by_monte_carlo() -> None:
    """20 chains, 120 texts each, drafts of 1 to 5 tokens: target calls; false-alarm rate 0.1 %."""
    found, truths = [], []
    for i, chain in enumerate(chains(INSTANCES, 3, 9, seed=3)):
        gamma = 1 + i % 5
        found.append(estimate(simulate(chain, Method(stop=Fixed(gamma)), 120, seed=i).target_calls))
        truths.append(speculative_counts(chain, gamma).target_calls)
    check_family(found, truths)


@pytest.mark.slow  # the same is enumerated above
@pytest.mark.statistical
def test_lossy_rules_by_monte_carlo() -> None:
    """20 chains under opt, uno, random and mentored in turn: drift and rejections; false-alarm rate 0.1 % each."""
    drifts: list[Estimate] = []
    refusals, truths = [], []
    for i, chain in enumerate(chains(INSTANCES, 3, 6, seed=4)):
        rule = (Opt(0.1), Uno(0.1), RandomAccept(0.4), Mentored(0.05))[i % 4]
        run = simulate(chain, Method(stop=Fixed(6), accept=rule, to_horizon=True), 100, seed=i)
        drifts.append(estimate(run.drift))
        refusals.append(estimate(run.rejections))
        truths.append(rule_on_chain(chain, rule))
    check_family(drifts, [truth.drift for truth in truths])
    check_family(refusals, [truth.rejections for truth in truths])


# --- what the theorems say of one another ----------------------------------------------------------------------------
def test_more_drafts_help_but_never_to_zero() -> None:
    chain = MarkovChain.random(5, 12, seed=9)
    counts = [batch_rejections(chain, m) for m in (1, 2, 4, 8, 64, 1000)]
    assert counts == sorted(counts, reverse=True)
    limit = batch_rejections(chain, None)
    assert 0 < limit < counts[-1] and counts[-1] - limit < 0.02 * limit


def test_the_limit_keeps_what_the_draft_can_never_say() -> None:
    """A draft that never draws token 2: the limit is that of the recursion, not the paper's with a product of 0."""
    chain = MarkovChain.random(3, 5, seed=3)
    q = chain.q.clone()
    q[..., 2] = 0
    blind = MarkovChain(chain.p, q / q.sum(-1, keepdim=True), chain.start)
    assert batch_rejections(blind, None) == pytest.approx(batch_rejections(blind, 3000), abs=1e-6)


def test_long_drafts_reach_theorem_1_and_short_ones_reject_less() -> None:
    chain = MarkovChain.random(4, 12, seed=5)
    full = speculative_counts(chain, 12, to_horizon=True)
    assert full.rejections == pytest.approx(expected_rejections(chain), abs=1e-10)
    short = speculative_counts(chain, 3)
    assert short.rejections < full.rejections and short.target_calls > full.target_calls
    assert 0 < mean_overlap(chain) < 1


def test_chains_that_are_none_are_refused() -> None:
    law = torch.full((2, 3, 3), 1 / 3, dtype=torch.float64)
    with pytest.raises(UserError, match="are no chain"):
        MarkovChain(law, law[:1], law[0, 0])
    with pytest.raises(UserError, match="is not a law"):
        MarkovChain(law, law * 1.1, law[0, 0])
    with pytest.raises(UserError, match="states=1"):
        MarkovChain.random(1)
    with pytest.raises(UserError, match="gamma=0"):
        speculative_counts(MarkovChain.random(2, 2), 0)
