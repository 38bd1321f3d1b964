"""Theorems 2, 4 and 5 at one position, and batch improvements."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.theory.oracles import batch_improvement
from tests.theory.tools import INSTANCES, check_family, laws
from torch import Tensor

from sprinter.decode.accept import (
    AcceptRule,
    Exact,
    Fuzzy,
    Lenient,
    Mentored,
    Opt,
    RandomAccept,
    Typical,
    Uno,
)
from sprinter.decode.accept.base import chances
from sprinter.decode.conformance import law_pairs
from sprinter.laws import residual, tv_distance
from sprinter.theory.front import (
    batch_laws,
    bernoulli_improvement,
    best_loss,
    best_replacement,
    excess,
    rejection,
    shortfall,
    uniform_improvement,
)
from sprinter.theory.montecarlo import estimate


def arbitrary(count: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """p, q and arbitrary b; a third of them nowhere below exact acceptance, with zeros and ones among the rest."""
    p, q = laws(count, vocab, seed)
    numbers = torch.Generator().manual_seed(seed + 1)
    b = torch.rand(count, vocab, generator=numbers, dtype=torch.float64)
    b[1::5] = b[1::5].round()
    above = torch.arange(count) % 3 == 0
    b[above] = torch.maximum(b[above], chances(p[above], q[above]))
    return p, q, b


# --- Theorems 2, 4, 5 ------------------------------------------------------------------------------------------------
def test_no_rule_is_below_the_front_and_equality_is_exactly_theorem_5() -> None:
    """10,000 arbitrary b: P(reject) + Loss* >= TV(p, q), with equality if and only if b >= min(1, p/q) where q > 0."""
    p, q, b = arbitrary(10_000, 8)
    gap = excess(p, q, b)
    assert float(gap.min()) >= -1e-12
    assert float((gap - shortfall(p, q, b)).abs().max()) <= 1e-12
    theorem_5 = ((b >= chances(p, q) - 1e-15) | (q == 0)).all(-1)
    assert 3000 < int(theorem_5.sum()) < 7000
    assert float(gap[theorem_5].abs().max()) <= 1e-12
    assert float(gap[~theorem_5].min()) > 1e-6


def test_no_replacement_beats_theorem_4() -> None:
    """Against 200 random replacement laws for each of 300 b; the one that the theorem names attains the loss."""
    p, q, b = arbitrary(300, 4, seed=3)
    loss, refused = best_loss(p, q, b), rejection(q, b).unsqueeze(-1)
    assert float(loss.min()) >= -1e-12
    attained = tv_distance(q * b + refused * best_replacement(p, q, b), p)
    assert float((attained - loss).abs().max()) <= 1e-12
    numbers = torch.Generator().manual_seed(0)
    tries = torch.rand(200, 1, 4, generator=numbers, dtype=torch.float64) ** 4
    tries = tries / tries.sum(-1, keepdim=True)
    assert float((tv_distance(q * b + refused * tries, p) - loss).min()) >= -1e-12


def test_theorem_4_against_every_replacement_on_a_grid() -> None:
    """Every law in steps of 1/40 on three tokens comes as near as the grid allows, and none below."""
    p, q, b = arbitrary(30, 3, seed=5)
    steps = [(i / 40, j / 40, 1 - (i + j) / 40) for i in range(41) for j in range(41 - i)]
    grid = torch.tensor(steps, dtype=torch.float64).unsqueeze(1)
    losses = tv_distance(q * b + rejection(q, b).unsqueeze(-1) * grid, p).amin(0)
    gap = losses - best_loss(p, q, b)
    assert float(gap.min()) >= -1e-12 and float(gap.max()) <= 2 / 40


ON_THE_LINE = [
    Exact(),
    Opt(0.01),
    Opt(0.1),
    Opt(1.0),
    Lenient(0.6),
    Mentored(0.02),
    Mentored(0.1),
    Mentored(1.0),
]
ABOVE = [
    Uno(0.05),
    RandomAccept(0.5),
    Fuzzy("tv", 0.3),
    Fuzzy("kl", 0.4),
    Fuzzy("js_reference", 0.3),
    Typical(),
]


def place(rule: AcceptRule, p: Tensor, q: Tensor) -> Tensor:
    """P(reject) + TV(π, p) − TV(p, q) of a rule, the distance that its measured point has to the front."""
    return rejection(q, rule.keep(p, q)) + rule.drift(p, q) - tv_distance(p, q)


@pytest.mark.parametrize("rule", ON_THE_LINE, ids=str)
def test_rules_on_the_front(rule: AcceptRule) -> None:
    p, q = laws(500, 8, seed=7)
    assert float(place(rule, p, q).abs().max()) <= 1e-9


@pytest.mark.parametrize("rule", ABOVE, ids=str)
def test_rules_above_the_front(rule: AcceptRule) -> None:
    p, q = laws(500, 8, seed=7)
    gap = place(rule, p, q)
    assert float(gap.min()) >= -1e-12 and float(gap.mean()) > 1e-3


def test_edge_cases_stay_finite() -> None:
    for p, q in law_pairs(40):
        for b in (torch.zeros_like(p), torch.ones_like(p), chances(p, q)):
            assert float(excess(p, q, b)) == pytest.approx(float(shortfall(p, q, b)), abs=1e-12)


@pytest.mark.statistical
def test_theorem_5_by_monte_carlo() -> None:
    """20 rules: 20,000 draws each; refusals, and a token's excess chance over the tokens where π > p. 0.1 % each."""
    refusals, drifts, chances_, losses = [], [], [], []
    numbers = torch.Generator().manual_seed(11)
    p, q, b = arbitrary(INSTANCES, 6, seed=9)
    for i in range(INSTANCES):
        x = torch.multinomial(q[i], 20_000, replacement=True, generator=numbers)
        refused = torch.rand(20_000, generator=numbers) >= b[i][x]
        y = torch.multinomial(best_replacement(p[i], q[i], b[i]), 20_000, replacement=True, generator=numbers)
        law = q[i] * b[i] + rejection(q[i], b[i]) * best_replacement(p[i], q[i], b[i])
        more = law > p[i] + 1e-12
        token = torch.where(refused, y, x)
        refusals.append(estimate(refused))
        drifts.append(estimate(more[token].double() - float(p[i][more].sum())))
        chances_.append(float(rejection(q[i], b[i])))
        losses.append(float(best_loss(p[i], q[i], b[i])))
    check_family(refusals, chances_)
    check_family(drifts, losses)


# --- batches ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_batch_by_enumeration(drafts: int) -> None:
    """Every combination of M draft tokens, tried in order."""
    for p, q in zip(*laws(12, 3, seed=2), strict=True):
        refused, replaced = 0.0, torch.zeros(3, dtype=torch.float64)
        for tokens in itertools.product(range(3), repeat=drafts):
            chance, left = 1.0, p
            for x in tokens:
                chance *= float(q[x] * (1 - (left[x] / q[x] if q[x] > 0 else left[x]).clamp(max=1)))
                left = residual(left, q)
            refused += chance
            replaced += chance * left
        found, law = batch_laws(p, q, drafts)
        assert float(found) == pytest.approx(refused, abs=1e-10)
        assert (float(found) * law).tolist() == pytest.approx(replaced.tolist(), abs=1e-10)


def test_closed_forms_of_the_paper() -> None:
    for u, v in itertools.product((0.1, 0.35, 0.5, 0.8, 1.0), repeat=2):
        q, p = torch.tensor([[u, 1 - u], [v, 1 - v]], dtype=torch.float64)
        for m in (1, 2, 5, 9):
            wanted = float(bernoulli_improvement(u, v, m))
            assert float(batch_improvement(p, q, m)) == pytest.approx(wanted, abs=1e-10)
    for inside, size in ((2, 6), (5, 5), (1, 8)):
        q = torch.full((size,), 1 / size, dtype=torch.float64)
        p = (torch.arange(size) < inside).double() / inside
        for m in (1, 2, 5):
            wanted = float(uniform_improvement(size / inside, m))
            assert float(batch_improvement(p, q, m)) == pytest.approx(wanted, abs=1e-10)


def test_the_limit_of_many_drafts() -> None:
    """Tokens that the draft never draws are still missed; without such tokens nothing is."""
    p, q = laws(60, 5, seed=1)
    refused, law = batch_laws(p, q, None)
    many, nearly = batch_laws(p, q, 4000)
    assert float((refused - many).abs().max()) <= 1e-3
    assert float((refused.unsqueeze(-1) * law - many.unsqueeze(-1) * nearly).abs().max()) <= 1e-3
    assert bool((refused[(q > 0).all(-1)] == 0).all()) and float(refused.max()) > 0.01


@pytest.mark.statistical
def test_batch_improvement_by_monte_carlo() -> None:
    """20 random laws, M from 2 to 6, 20,000 batches each; false-alarm rate 0.1 %."""
    numbers = torch.Generator().manual_seed(1)
    estimates, truths = [], []
    for i, (p, q) in enumerate(zip(*laws(INSTANCES, 5, seed=6), strict=True)):
        left, m = p, 2 + i % 5
        refused = torch.ones(20_000, dtype=torch.bool)
        for _ in range(m):
            x = torch.multinomial(q, 20_000, replacement=True, generator=numbers)
            refused &= torch.rand(20_000, generator=numbers, dtype=torch.float64) >= chances(left, q)[x]
            left = residual(left, q)
        estimates.append(estimate(float(tv_distance(p, q)) - refused.double()))
        truths.append(float(batch_improvement(p, q, m)))
    check_family(estimates, truths)
