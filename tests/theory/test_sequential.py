"""SPRINTER's theorems: against sums, the real loop enumerated, and Monte Carlo through the real loop."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
import torch
from tests.theory.oracles import sequential_counts
from tests.theory.tools import INSTANCES, ChainPair, chains, check_family, class_paths, from_zero

from sprinter.decode.draft import Origin
from sprinter.decode.spec import Method
from sprinter.decode.stop import Untrusted
from sprinter.errors import UserError
from sprinter.laws import tv_distance
from sprinter.theory.chains import MarkovChain
from sprinter.theory.montecarlo import ClassGate, estimate, simulate
from sprinter.theory.sequential import (
    acceptance_rate,
    emitted_law,
    emitted_tv,
    expected_stop_time,
    expected_trusted,
    run_lengths,
    sequential_flops,
    sequential_speed_up,
    sequential_tokens_per_call,
    speculative_flops,
    survival,
    trusted_law,
)

RATES = torch.rand(INSTANCES, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).tolist()


def picture(r: int, length: int) -> MarkovChain:
    """The theorems' picture: the first r draft tokens are acceptable, all later ones are not."""
    half, sure = torch.tensor([0.5, 0.5]).double(), torch.tensor([1.0, 0.0]).double()
    p = half.expand(length, 2, 2)
    q = torch.stack([half if n < r else sure for n in range(length)]).unsqueeze(1).expand(length, 2, 2)
    return MarkovChain(p, q, sure)


def gated(eta_tp: float, eta_fp: float, cap: int | None = None) -> Method:
    return Method(trust=ClassGate(eta_tp, eta_fp), stop=Untrusted(), cap=cap)


# --- formulas against sums -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cap", [None, 1, 3, 5, 20])
@pytest.mark.parametrize("r", [0, 1, 4, 7])
def test_mean_law_and_survival_agree(r: int, cap: int | None) -> None:
    for tp, fp in ((0.0, 0.0), (0.9, 0.5), (0.3, 0.8), (1.0, 0.6), (0.7, 0.0)):
        law = trusted_law(400, tp, fp, r, cap)
        i = torch.arange(401)
        assert float(law.sum()) == pytest.approx(1, abs=1e-12) and bool((law >= 0).all())
        assert float((i * law).sum()) == pytest.approx(float(expected_trusted(tp, fp, r, cap)), abs=1e-10)
        assert float(law[3:].sum()) == pytest.approx(float(survival(3, tp, fp, r, cap)), abs=1e-12)


def test_printed_formulas() -> None:
    """Theorems 3.3 and 3.4 as the paper prints them."""
    for (tp, fp), r in zip(RATES, [0, 1, 2, 5, 9] * 4, strict=True):
        mean = (tp - tp**r) / (1 - tp) + tp**r / (1 - fp)
        time = 0.1 * ((1 - tp**r) / (1 - tp) + tp**r / (1 - fp))
        assert float(expected_trusted(tp, fp, r)) == pytest.approx(mean, abs=1e-10)
        assert float(expected_stop_time(tp, fp, r, 0.1)) == pytest.approx(time, abs=1e-10)
        assert time == pytest.approx(0.1 * (1 + mean), abs=1e-10)
        for i in range(12):
            chance = tp**i * (1 - tp) if i < r else tp**r * fp ** (i - r) * (1 - fp)
            assert float(trusted_law(12, tp, fp, r)[i]) == pytest.approx(chance, abs=1e-12)


def test_limits_at_rates_of_one() -> None:
    assert float(expected_trusted(1.0, 0.5, 5)) == 6.0
    assert float(expected_trusted(1.0, 0.0, 5)) == 5.0
    assert math.isinf(float(expected_trusted(0.5, 1.0, 2))) and math.isinf(
        float(expected_trusted(1.0, 1.0, 0))
    )
    assert float(expected_trusted(0.0, 1.0, 3)) == 0.0
    assert float(expected_trusted(1.0, 1.0, 5, cap=20)) == 19.0
    near = float(expected_trusted(1 - 1e-12, 0.5, 5))
    assert near == pytest.approx(6.0, abs=1e-9)


def test_they_broadcast() -> None:
    found = expected_trusted(torch.tensor([[0.5], [0.9]]), 0.2, torch.tensor([1, 2, 3]), cap=10)
    assert found.shape == (2, 3)
    assert float(found[1, 2]) == pytest.approx(float(expected_trusted(0.9, 0.2, 3, cap=10)))
    assert trusted_law(4, torch.tensor([0.5, 0.9]), 0.2, 2).shape == (2, 5)


def test_flops_by_hand() -> None:
    assert float(speculative_flops(5, 2.0, 30.0)) == 160.0
    assert float(sequential_flops(5, 2.0, 0.1, 30.0)) == 40.5


@pytest.mark.parametrize("call", [
    lambda: expected_trusted(1.2, 0.5, 3), lambda: expected_trusted(0.5, -0.1, 3),
    lambda: expected_trusted(0.5, 0.5, -1),
    lambda: expected_trusted(0.5, 0.5, 3, cap=0), lambda: emitted_tv(0.5, 1.5),
    lambda: run_lengths(torch.zeros(0, 3).bool()),
    lambda: expected_stop_time(0.5, 0.5, 3, -1.0),
])  # fmt: skip
def test_bad_arguments_are_named(call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"out of range|must be|give"):
        call()


# --- the real loop, enumerated ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(("tp", "fp"), [(0.75, 0.5), (1.0, 0.25), (0.5, 1.0), (0.25, 0.0)])
def test_theorem_3_1_and_a_4_in_the_enumerated_loop(tp: float, fp: float) -> None:
    chain = from_zero(MarkovChain.random(3, 2, seed=5))
    first: defaultdict[int, float] = defaultdict(float)
    stays = drift = 0.0
    for chance, record in class_paths(gated(tp, fp), ChainPair(chain), 2):
        token = record.tokens[0]
        first[token.id] += chance
        stays += chance * (token.origin in (Origin.TRUSTED, Origin.ACCEPTED))
        drift += chance * (token.drift or 0.0)
    p, q = chain.p[0, 0], chain.q[0, 0]
    law = emitted_law(p, q, fp)
    assert [first[x] for x in range(3)] == pytest.approx(law.tolist(), abs=1e-10)
    tv = float(tv_distance(p, q))
    assert drift == pytest.approx(float(emitted_tv(fp, tv)), abs=1e-10)
    assert float(tv_distance(law, p)) == pytest.approx(drift, abs=1e-10)
    assert stays == pytest.approx(float(acceptance_rate(fp, tv)), abs=1e-10)


@pytest.mark.parametrize("r", [0, 1, 4])
def test_theorems_3_3_and_3_4_in_the_enumerated_loop(r: int) -> None:
    """The law of N, and the tokens of a round; p(x)/q(x) is 1/2 where x is unacceptable.

    Texts are just long enough for a first round of three tokens and its bonus.
    """
    cap, law, tokens, steps = 3, [0.0] * 4, 0.0, 0.0
    for chance, record in class_paths(gated(0.75, 0.5, cap), ChainPair(picture(r, cap + 1)), cap + 1):
        n = sum(t.round == 1 and t.origin is Origin.TRUSTED for t in record.tokens)
        law[n] += chance
        tokens += chance * record.accept_lengths[0]
        steps += chance * (n + 1)
    assert law == pytest.approx(trusted_law(cap, 0.75, 0.5, r, cap).tolist(), abs=1e-10)
    assert steps == pytest.approx(float(expected_stop_time(0.75, 0.5, r, 1.0, cap)), abs=1e-10)
    assert tokens == pytest.approx(float(sequential_tokens_per_call(0.75, 0.5, r, cap, kept=0.5)), abs=1e-10)


# --- Monte Carlo through the real loop -------------------------------------------------------------------------------
@pytest.mark.statistical
def test_theorem_3_1_by_monte_carlo() -> None:
    """Drift and target calls of whole texts on 20 random chains; false-alarm rate 0.1 % each."""
    drifts, calls, truths = [], [], []
    for i, (chain, (tp, fp)) in enumerate(zip(chains(INSTANCES, 4, 6), RATES, strict=True)):
        run = simulate(chain, gated(tp, fp), 120, seed=i)
        drifts.append(estimate(run.drift))
        calls.append(estimate(run.target_calls))
        truths.append(sequential_counts(chain, tp, fp))
    check_family(drifts, [truth.drift for truth in truths])
    check_family(calls, [truth.target_calls for truth in truths])


@pytest.mark.parametrize(("tp", "fp"), [(0.75, 0.5), (0.25, 1.0)])
def test_whole_texts_in_the_enumerated_loop(tp: float, fp: float) -> None:
    chain = from_zero(MarkovChain.random(2, 3, seed=8))
    calls = drift = bonus = 0.0
    for chance, record in class_paths(gated(tp, fp), ChainPair(chain), 3):
        calls += chance * record.stats.target_calls
        drift += chance * sum(token.drift or 0.0 for token in record.tokens)
        bonus += chance * sum(token.origin is Origin.BONUS for token in record.tokens)
    assert (calls, drift, bonus) == pytest.approx(sequential_counts(chain, tp, fp), abs=1e-10)


@pytest.mark.slow  # the same is enumerated above
@pytest.mark.statistical
def test_theorems_3_3_and_3_4_by_monte_carlo() -> None:
    """20 random (η_TP, η_FP, r), cap 8: the mean of N, of the stop time, and of the tokens of a round; 0.1 % each."""
    trusted, tokens, wanted, written = [], [], [], []
    for i, (tp, fp) in enumerate(RATES):
        r = i % 6
        run = simulate(picture(r, 9), gated(tp, fp, 8), 150, seed=i)
        trusted.append(estimate(run.first_trusted + 1))
        tokens.append(estimate(run.first_tokens))
        wanted.append(float(expected_stop_time(tp, fp, r, 1.0, cap=8)))
        written.append(float(sequential_tokens_per_call(tp, fp, r, 8, kept=0.5)))
    check_family(trusted, wanted)
    check_family(tokens, written)


@pytest.mark.statistical
def test_speed_up_by_monte_carlo() -> None:
    """20 instances, 4,000 rounds each, without the loop: tokens − speed·time has mean 0; false-alarm rate 0.1 %."""
    numbers = torch.Generator().manual_seed(3)
    estimates = []
    for i, (tp, fp) in enumerate(RATES):
        r, t_d, t_t, t_v = i % 6, 0.05 + i / 40, 1.0, 0.01
        rate = torch.where(torch.arange(29) < r, tp, fp)
        trusted = (torch.rand(4000, 29, generator=numbers) < rate).double().cumprod(-1).sum(-1)
        kept = (trusted < r) | (torch.rand(4000, generator=numbers) < 0.5)
        speed = float(sequential_speed_up(tp, fp, r, t_d, t_t, t_v, cap=30, kept=0.5))
        spent = ((trusted + 1) * (t_d + t_v) + t_t) / t_t
        estimates.append(estimate(trusted + 1 + kept - speed * spent))
    check_family(estimates, [0.0] * INSTANCES)


# --- from labels -----------------------------------------------------------------------------------------------------
def test_run_lengths_of_one_text_by_hand() -> None:
    """1 1 0: runs of 2, 1 and 0, none censored; then 1 1 at the end, censored at 2 and 1."""
    labels = torch.tensor([[1, 1, 0]]).bool()
    assert run_lengths(labels).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3])
    law = run_lengths(torch.tensor([[1, 1, 0, 1, 1]]).bool())
    # five runs: 2, 1, 0 end, 2+ and 1+ are censored; 1 of 5 ends at 0, then 1 of 3 that are seen to try a second token
    assert law.tolist() == pytest.approx([1 / 5, 4 / 5 / 3, 8 / 15])


def test_run_lengths_stop_at_the_texts_end() -> None:
    labels = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()
    shorter = run_lengths(labels, torch.tensor([2, 3]))
    assert shorter.tolist() == pytest.approx([2 / 5, 2 / 5, 1 / 5])


@pytest.mark.statistical
def test_run_lengths_of_independent_labels_are_geometric() -> None:
    """40,000 labels of rate 0.7: mean r is 0.7/0.3; it is off by 0.1 with probability below 1e-5."""
    labels = torch.rand(400, 100, generator=torch.Generator().manual_seed(0)) < 0.7
    law = run_lengths(labels)
    assert float(law.sum()) == pytest.approx(1.0)
    assert float((law * torch.arange(len(law))).sum()) == pytest.approx(0.7 / 0.3, abs=0.15)
    assert law[:4].tolist() == pytest.approx([0.3 * 0.7**i for i in range(4)], abs=0.01)
