"""Several drafts: joint law p by enumeration, the mutants of Algorithm 4, Theorem 3's count of rejections."""

import itertools
import math

import pytest
import torch

from sprinter.decode.accept import Batch, Exact, SpecTr
from sprinter.decode.accept.several import SeveralRule, _solve_rho
from sprinter.decode.conformance import check_same_law, law_pairs
from sprinter.decode.draft import Origin
from sprinter.decode.drafter import Model
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.spec import Method, parse_method
from sprinter.decode.stop import Fixed, Svip
from sprinter.decode.trust import Coin
from sprinter.errors import UserError
from sprinter.laws import residual, tv_distance
from sprinter.random import AddressedDraws

NAMES = ("batch", "specinfer", "spectr")


SHAPES = [(1, 2, 3, 3), (2, 2, 3, 3), (3, 2, 3, 2), (8, 1, 2, 2)]


@pytest.mark.parametrize(
    ("name", "drafts", "gamma", "length", "vocab"),
    [
        pytest.param(name, *shape, marks=pytest.mark.slow if (name, shape) == ("spectr", SHAPES[1]) else ())
        for name in NAMES
        for shape in SHAPES
    ],
)
def test_joint_law_is_the_targets(name, drafts, gamma, length, vocab):
    pair = MarkovPair(vocab=vocab, seed=drafts)
    found = joint_law(parse_method(f"{name}(drafts={drafts}, gamma={gamma})"), pair, length)
    check_same_law(found, target_joint_law(pair, length), f"{name} with {drafts} drafts")


@pytest.mark.parametrize("name", NAMES)
def test_joint_law_with_zeros_and_ends(name):
    pair = MarkovPair(seed=11, zeros=0.4, sharp=2.0)

    def ends(text):
        return "eos" if text[-1] == 2 else None

    method = parse_method(f"{name}(drafts=2, gamma=2)")
    check_same_law(joint_law(method, pair, 3, ends=ends), target_joint_law(pair, 3, ends=ends), name)


class SubtractsTwice(Batch):
    """Algorithm 4 as printed, first reading: the residual is taken twice after the first refusal."""

    def pick(self, p, q, candidates, keep):
        for index, x in enumerate(candidates):
            if keep(index, float((p[x] / q[x]).clamp(max=1))):
                return index, p
            p = residual(p, q) if index else residual(residual(p, q), q)
        return None, p


class StopsAfterTheFirst(Batch):
    """Algorithm 4 as printed, second reading: the last branch fires after the first draft, with p^{M+1}."""

    def pick(self, p, q, candidates, keep):
        if keep(0, float((p[candidates[0]] / q[candidates[0]]).clamp(max=1))):
            return 0, p
        for _ in candidates:
            p = residual(p, q)
        return None, p


@pytest.mark.parametrize("mutant", [SubtractsTwice, StopsAfterTheFirst])
def test_mutant_biased_readings_of_algorithm_4(mutant):
    # Several tokens must have p > q, or every residual is the same one-hot law and the readings agree.
    pair, sound = MarkovPair(vocab=5, seed=2), Method(accept=Batch(), stop=Fixed(1), drafter=Model(drafts=2))
    check_same_law(joint_law(sound, pair, 2), target_joint_law(pair, 2), "Algorithm 4, corrected")
    biased = Method(accept=mutant(), stop=Fixed(1), drafter=Model(drafts=2))
    with pytest.raises(AssertionError, match="has chance"):
        check_same_law(joint_law(biased, pair, 2), target_joint_law(pair, 2), "mutant")


def theorem_3(pair, drafts, length):
    """E[N_rej] of batch decoding whose drafts run to the horizon, by recursion over all texts.

    A position at which a round begins refuses all M candidates with chance Π_m TV(p^m, q), any other its one draft
    with chance TV(p, q); a round begins at the prompt and after each replacement (Yin et al. 2024, Theorem 3).
    """
    total = 0.0

    def walk(text, chance, fresh):
        """``fresh``: the chance, given the text so far, that a round begins here with ``drafts`` candidates."""
        nonlocal total
        if len(text) == length + 1:
            return
        p, q = pair.p(text), pair.q(text)
        ladder, laws = [], [p]
        for _ in range(drafts):
            ladder.append(float(tv_distance(laws[-1], q)))
            laws.append(residual(laws[-1], q))
        single, batch = ladder[0], math.prod(ladder)
        total += chance * (fresh * batch + (1 - fresh) * single)
        one, several = residual(p, q), laws[-1]
        for x in range(pair.vocab):
            # The next position is fresh if this token was a replacement.
            replaced = fresh * batch * float(several[x]) + (1 - fresh) * single * float(one[x])
            if float(p[x]) > 0:
                walk((*text, x), chance * float(p[x]), replaced / float(p[x]))

    walk((0,), 1.0, 1.0)
    return total


def rejections(record):
    return sum(token.origin is Origin.REPLACEMENT for token in record.tokens)


@pytest.mark.statistical
@pytest.mark.parametrize("drafts", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5))])
def test_rejections_of_batch_are_theorem_3s(drafts):
    """99 % interval for each of five counts; chance that a sound engine fails any: 5 %, and the seed is fixed."""
    pair, length, runs = MarkovPair(vocab=4, seed=21, sharp=1.5), 4, 1500
    method = Method(stop=Fixed(length), accept=Batch(), drafter=Model(drafts=drafts), to_horizon=True)
    counts = torch.tensor(
        [
            float(rejections(run_chain(method, pair, (0,), Limits(length), AddressedDraws(7, request))))
            for request in range(runs)
        ]
    )
    expected = theorem_3(pair, drafts, length)
    margin = 2.576 * float(counts.std()) / math.sqrt(runs)
    assert abs(float(counts.mean()) - expected) <= margin
    if drafts > 1:
        assert expected < theorem_3(pair, 1, length) - 2 * margin  # several drafts help, visibly


def test_theorem_3_with_one_draft_is_theorem_1():
    pair, length = MarkovPair(seed=5), 3
    wanted = 0.0
    for n in range(length):
        for text in itertools.product(range(3), repeat=n):
            chance, prefix = 1.0, (0,)
            for x in text:
                chance *= float(pair.p(prefix)[x])
                prefix = (*prefix, x)
            wanted += chance * float(tv_distance(pair.p(prefix), pair.q(prefix)))
    assert theorem_3(pair, 1, length) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5, 8])
def test_k_seq_solves_its_equation_and_leaves_a_law(k):
    for p, q in law_pairs(100):
        rho, beta = _solve_rho(p, q, k)
        assert 1 <= rho <= k
        if beta > 1e-12:
            assert 1 - (1 - beta) ** k == pytest.approx(rho * beta, abs=1e-9)
        _, law = SpecTr().pick(p, q, [int(q.argmax())] * k, lambda index, chance: False)
        assert float(law.min()) >= 0
        assert float(law.sum()) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model(drafts=0), "drafts=0"),
        (lambda: Model(drafts=9), r"drafts=9 .* \[1, 8\]"),
        (lambda: Method(accept=Exact(), drafter=Model(drafts=2)), "judges one draft"),
        (lambda: Method(accept=Batch(), drafter=Model(drafts=2), stop=Svip()), "several drafts go with"),
        (lambda: Method(accept=Batch(), drafter=Model(drafts=2), trust=Coin()), "several drafts go with"),
    ],
)
def test_what_does_not_go_together(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_every_rule_for_several_drafts_is_here():
    from sprinter.decode.registry import ACCEPT

    several = {name for name in ACCEPT.names() if issubclass(ACCEPT.get(name), SeveralRule)}
    assert several == set(NAMES)
