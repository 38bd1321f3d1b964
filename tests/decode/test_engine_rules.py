"""What is special to the rules of engines: SGLang's replacement, FLy's outcomes, cascades' law; mutants are refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sprinter.decode.accept import Cactus, Cascade, Exact, Fly, GreedyMatch, Margin, Relaxed, Threshold
from sprinter.decode.conformance import check_accept, law_pairs
from sprinter.decode.draft import Control
from sprinter.decode.enumerate import MarkovPair
from sprinter.errors import UserError
from sprinter.laws import kl_divergence, tv_distance


def laws(count: int = 300) -> tuple[Tensor, Tensor]:
    pairs = list(law_pairs(count))
    return torch.stack([p for p, _ in pairs]), torch.stack([q for _, q in pairs])


@pytest.mark.parametrize(("single", "total"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.3), (0.2, 0.6), (0.0, 1.0)])
def test_threshold_draws_from_p_without_the_refused_token(single: float, total: float) -> None:
    """π as SGLang's sampler makes it: the sum over the drafted token of what replaces it."""
    rule = Threshold(single, total)
    p, q = laws()
    keep = rule.keep(p, q)
    expected = q * keep
    for x in range(p.shape[-1]):
        without = p.clone()
        without[:, x] = 0
        left = without.sum(-1, keepdim=True)
        drawn = torch.where(left > 0, without / left, 0.0)
        expected = expected + (q * (1 - keep))[:, x : x + 1] * drawn
    assert torch.allclose(rule.law(p, q), expected, rtol=0, atol=1e-12)
    gap = float(tv_distance(expected, p).max())
    assert (gap < 1e-12) == rule.lossless


@dataclass(frozen=True)
class KeepsTheRefused(Threshold):
    """A mutant: the replacement may be the refused token."""

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return p


def test_a_mutant_is_refused() -> None:
    with pytest.raises(AssertionError, match="drift is not"):
        check_accept(KeepsTheRefused())


def by_coins(rule: Fly, tokens: tuple[int, ...], p: Tensor, q: Tensor, outside: bool = False) -> Tensor:
    """FLy's chances of each number of tokens, with every coin of the base rule thrown in advance.

    ``outside`` is a mutant: the window may reach beyond the draft.
    """
    n, base = len(tokens), Exact() if rule.base == "exact" else GreedyMatch()
    chance = [float(base.keep(p[i : i + 1], q[i : i + 1])[0, x]) for i, x in enumerate(tokens)]
    window, ending = min(rule.window, n - 1), torch.zeros(n + 1, dtype=torch.float64)
    for coins in itertools.product((True, False), repeat=n):
        weight = 1.0
        for coin, one in zip(coins, chance, strict=True):
            weight *= one if coin else 1 - one
        i = 0
        while i < n:
            if not coins[i]:
                most = p[i].sort(descending=True).values[: rule.top]
                unsure = float(-(most * most.clamp(min=1e-300).log()).sum()) >= rule.entropy
                behind = coins[i + 1 : i + 1 + window]
                fits = window > 0 and (outside or i + window <= n - 1)
                if not (fits and unsure and float(p[i, tokens[i]]) > 0 and all(behind)):
                    break
                i += window
            i += 1
        ending[min(i, n)] += weight
    return ending


@pytest.mark.parametrize(
    "rule", [Fly(2), Fly(1, 0.0), Fly(3, 0.5, 2), Fly(6), Fly(2, base="greedy")], ids=str
)
def test_fly_is_what_its_coins_say(rule: Fly) -> None:
    pair, forgave, mutant = MarkovPair(4, 3, sharp=1.5), 0, 0
    for tokens in itertools.product(range(4), repeat=4):
        q = torch.stack([pair.q((0, *tokens[:i])) for i in range(4)])
        p = torch.stack([pair.p((0, *tokens[:i])) for i in range(5)])
        ending, law_after = rule.ends(tokens, p, q)
        assert torch.allclose(ending, by_coins(rule, tokens, p, q), rtol=0, atol=1e-12)
        base = Exact() if rule.base == "exact" else GreedyMatch()
        keep = base.keep(p[:4], q).gather(-1, torch.tensor(tokens)[:, None])
        mutant += not torch.allclose(ending, by_coins(rule, tokens, p, q, outside=True))
        forgave += float(ending[4]) > float(keep.prod()) + 1e-9
        assert torch.equal(law_after(4), p[4])
        assert torch.allclose(law_after(1), base.replacement(p[1:2], q[1:2])[0])
    assert mutant > 0 and forgave > 0, "no draft of these laws is forgiven anything"


def cactus_law(rule: Cactus, p: Tensor, q: Tensor) -> Tensor:
    """π of one position, token by token as the paper's algorithm has it."""
    law = torch.zeros_like(p)
    for x, drawn in enumerate(q.tolist()):
        h = min(1.0, float(p[x]) + (2 * rule.delta * float(p[x]) * (1 - float(p[x]))) ** 0.5)
        keep = min(1.0, h / drawn) if drawn > 0 else 1.0
        law[x] += drawn * keep
        if drawn * (1 - keep) > 0:
            raised = p * (1 - h) / (1 - p[x])
            raised[x] = h
            left = (raised - q).clamp(min=0)
            law += drawn * (1 - keep) * left / left.sum()
    return law


@pytest.mark.parametrize(("delta", "least"), [(0.01, 5.0), (0.1, 2.0), (0.5, 1.0)])
def test_cactus_does_not_keep_its_bound(delta: float, least: float) -> None:
    """Its declared chances are those of the paper's algorithm, and KL(π‖p) of a position exceeds delta."""
    rule, worst = Cactus(delta), 0.0
    for p, q in itertools.islice(law_pairs(200), 10, None):
        declared = torch.zeros_like(p)
        for x, drawn in enumerate(q.tolist()):
            if drawn > 0:
                outcomes = rule.outcomes([x], torch.stack([p, p]), q.unsqueeze(0))
                declared += drawn * outcomes[0]
                declared[x] += drawn * outcomes[1].sum()
        law = cactus_law(rule, p, q)
        assert torch.allclose(declared, law, rtol=0, atol=1e-9)
        if bool((p > 1e-6).all()):
            worst = max(worst, float(kl_divergence(law, p)) / delta)
    assert worst > least


def test_cactus_without_slack_is_exact() -> None:
    check_accept(Cactus(0.0))


@pytest.mark.parametrize("deferral", ["chow", "diff", "opt"])
def test_a_cascade_writes_one_of_the_two_laws(deferral: str) -> None:
    p, q = laws()
    seen = set()
    for alpha in (0.0, 0.3, 0.9):
        law = Cascade(deferral, alpha).law(p, q)
        deferred = Cascade(deferral, alpha)._deferred(p, q, None)
        assert torch.allclose(law, torch.where(deferred, p, q), rtol=0, atol=1e-12)
        seen |= set(deferred.flatten().tolist())
    assert seen == {True, False}
    more = [
        float(Cascade(deferral, alpha)._deferred(p, q, None).double().mean()) for alpha in (0.1, 0.5, 0.9)
    ]
    assert more == sorted(more, reverse=True)


def test_decisions_are_taken_on_the_raw_laws() -> None:
    """At temperature 0 both laws are one-hot; the raw ones still say how sure the models are."""
    raw = Control(torch.tensor([[0.5, 0.4, 0.1]]), torch.tensor([[0.3, 0.6, 0.1]]))
    p, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    assert Relaxed(2, 0.1 + 1e-6).keep(p, q, raw).tolist() == [[1, 1, 0]]
    assert Relaxed(2, 0.05).keep(p, q, raw).tolist() == [[1, 0, 0]]
    assert Relaxed(1, 1.0).keep(p, q, raw).tolist() == [[1, 0, 0]]
    assert Cascade("diff", 0.0).keep(p, q, raw).tolist() == [[1, 1, 1]], "the draft is surer than the target"
    assert Cascade("chow", 0.3).keep(p, q, raw).tolist() == [[1, 0, 1]], "deferred: exact"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Relaxed(top_k=0), "top_k=0"),
        (lambda: Relaxed(delta=1.5), "delta=1.5"),
        (lambda: Threshold(total=0), "total=0"),
        (lambda: Cactus(-1), "delta=-1"),
        (lambda: Cascade("opts"), "did you mean 'opt'"),
        (lambda: Fly(base="exacts"), "did you mean 'exact'"),
        (lambda: Fly(window=0), "window=0"),
    ],
)
def test_values_out_of_range_are_one_line(make: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()  # type: ignore[operator]


def test_margin_keeps_the_runner_up_within_nats() -> None:
    """ln p1 - ln p2 <= (1 - theta) logit, read from the raw law; the third never stays, equal ones both do."""
    near = math.exp((0.9 - 1) * 20)  # p2/p1 at the border: e^-2
    raw = torch.tensor(
        [[1.0, near * 1.01, 0.1, 0.0], [1.0, near * 0.99, 0.1, 0.0], [1.0, 0.2, 1.0, 0.9]]
    ).double()
    raw /= raw.sum(-1, keepdim=True)
    p = torch.full_like(raw, 0.25)  # the processed law says only where a refused token goes
    p[:, 2] += 0.25
    kept = Margin(0.9, 20.0).keep(p, p, Control(raw, raw))
    assert kept.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]
    assert Margin(0.9, 20.0).replacement(p, p).argmax(-1).tolist() == [2, 2, 2]
    assert Margin(1.0, 20.0).keep(raw[:2], raw[:2]).tolist() == [[1, 0, 0, 0], [1, 0, 0, 0]]
