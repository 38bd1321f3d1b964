"""Rules that judge a chain as a whole: verdicts have the declared chances, and the public check finds wrong ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sprinter.decode.accept import Block, ChainRule, Exact, TargetCall
from sprinter.decode.accept.base import chances
from sprinter.decode.conformance import check_accept, check_same_law
from sprinter.decode.draft import Control
from sprinter.decode.enumerate import EnumeratedDraws, MarkovPair, joint_law, target_joint_law
from sprinter.decode.method import Method
from sprinter.decode.sequence import Tree
from sprinter.decode.stop import (
    AdaEdl,
    Calibrated,
    Fixed,
    Heuristic,
    Optimal,
    StopRule,
    Svip,
    Untrusted,
)
from sprinter.decode.trust import Coin, Gate, Nobody
from sprinter.laws import residual


@dataclass(frozen=True)
class Walk(ChainRule):
    """Exact acceptance, position by position, as outcomes of the whole chain."""

    @property
    def lossless(self) -> bool:
        return True

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        made, reached = torch.zeros_like(p), 1.0
        for i, x in enumerate(tokens):
            keep = float(chances(p[i], q[i])[x])
            made[i] = reached * (1 - keep) * residual(p[i], q[i])
            reached *= keep
        made[-1] = reached * p[-1]
        return made


@dataclass(frozen=True)
class AllOrNone(ChainRule):
    """Lossy: half of the chains stay as they are, of the others nothing does."""

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        made = torch.zeros_like(p)
        made[0], made[-1] = 0.5 * p[0], 0.5 * p[-1]
        return made


class FirstAlone(Walk):
    """A mutant: the chain's ratios are not multiplied, the last token decides alone."""

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        made = torch.zeros_like(p)
        keep = float(chances(p[-2], q[-1])[tokens[-1]])
        made[-1], made[-2] = keep * p[-1], (1 - keep) * residual(p[-2], q[-1])
        return made


class Leaks(Walk):
    """A mutant: chances that do not sum to 1."""

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return 0.9 * super().outcomes(tokens, p, q, control)


class Modest(Walk):
    """A mutant: lossless, and does not say so."""

    @property
    def lossless(self) -> bool:
        return False


def test_sound_chain_rules_pass() -> None:
    check_accept(Walk())
    check_accept(AllOrNone())


@pytest.mark.parametrize(
    ("rule", "message"),
    [(FirstAlone(), "has chance"), (Leaks(), "sum to 1 only within"), (Modest(), "never differs from p")],
)
def test_wrong_chain_rules_are_found(rule: ChainRule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accept(rule)


def test_a_false_claim_at_temperature_0_is_found() -> None:
    class Claims(AllOrNone):
        @property
        def lossless_greedy(self) -> bool:
            return True

        def outcomes(
            self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None
        ) -> Tensor:
            made = torch.zeros_like(p)
            made[-1] = p[-1]
            return made

    with pytest.raises(AssertionError, match="claims lossless_greedy"):
        check_accept(Claims())


def test_the_verdict_has_the_declared_chances() -> None:
    pair, rule = MarkovPair(3, 4), AllOrNone()
    tokens = (0, 2)
    laws = [pair.q((0, *tokens[:i])) for i in range(2)]
    p = torch.stack([pair.p((0, *tokens[:i])) for i in range(3)])
    found = torch.zeros_like(p)
    draws = EnumeratedDraws()
    while True:
        verdict = rule.judge(TargetCall(Tree(tokens, laws), p, None, draws, 1, 1))
        found[verdict.accepted, verdict.token] += draws.weight
        assert verdict.drifts == [None] * (verdict.accepted + 1), (
            "a lossy chain rule has no drift of one position"
        )
        if not draws.next_path():
            break
    assert torch.allclose(found, rule.outcomes(tokens, p, torch.stack(laws)), atol=1e-12)


@pytest.mark.parametrize("stop", [Fixed(2), Svip(0.6)])
def test_a_chain_rule_of_positions_writes_what_the_positions_rule_writes(stop: Fixed | Svip) -> None:
    pair = MarkovPair(3, 5)
    walked = joint_law(Method(accept=Walk(), stop=stop, cap=3), pair, 3)
    check_same_law(walked, joint_law(Method(accept=Exact(), stop=stop, cap=3), pair, 3), "Walk")
    check_same_law(walked, target_joint_law(pair, 3), "Walk")


def test_it_judges_what_a_trust_rule_leaves() -> None:
    """With p = q, the law must be p, no matter which tokens are trusted."""
    pair = MarkovPair(3, 5, distance=0.0)
    method = Method(trust=Coin(0.5), stop=Untrusted(), accept=Walk(), cap=3)
    check_same_law(joint_law(method, pair, 3), target_joint_law(pair, 3), "Walk behind a coin")


# --- a rule whose verdict needs the whole chain: block verification, and its mutants -------------------------------
@dataclass(frozen=True)
class InBlocks(ChainRule):
    """Block verification (Sun et al. 2024, arXiv 2403.10444, Algorithm 2) as the paper's loop has it, with a fault."""

    fault: str = ""

    @property
    def lossless(self) -> bool:
        return True

    def outcomes(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        n, fault = len(tokens), self.fault
        w = [1.0]
        for k, x in enumerate(tokens):
            last = k == n - 1
            before = w[k]
            if fault == "cap missing before the last" and last and k > 0:
                before = w[k - 1] * float(p[k - 1, tokens[k - 1]] / q[k - 1, tokens[k - 1]])
            value = before * float(p[k, x] / q[k, x])
            uncapped = fault == "all uncapped" or (last and fault.startswith("last uncapped"))
            w.append(value if uncapped else min(value, 1.0))
        h, laws = [], []
        for k in range(n):
            residual = (w[k] * p[k] - q[k]).clamp(min=0.0)
            total = float(residual.sum())
            h.append(1.0 if total + 1 - w[k] <= 0 else min(total / (total + 1 - w[k]), 1.0))
            if fault == "token residual":
                residual = (p[k] - q[k]).clamp(min=0.0)
            laws.append(residual / residual.sum() if residual.sum() > 0 else p[k])
        h[0] = 1.0
        h.append(w[n] if fault == "last uncapped, chance above 1" else min(w[n], 1.0))
        if fault == "own chance for all":
            h[1:] = [min(one, 1.0) for one in w[1:]]
        laws.append(p[n])
        left, rows = 1.0, []
        for k in reversed(range(n + 1)):
            rows.append(left * h[k] * laws[k])
            left *= 1 - h[k]
        return torch.stack(rows[::-1])


@pytest.mark.parametrize("fault", ["", "last uncapped, coin clamped"])
def test_the_loop_of_the_paper_passes(fault: str) -> None:
    """Without fault; and u <= h with h > 1 is u <= 1: the last cap changes nothing where a coin is drawn."""
    check_accept(InBlocks(fault))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("last uncapped, chance above 1", "negative chance"),
        ("cap missing before the last", "has chance"),
        ("token residual", "has chance"),
        ("all uncapped", "has chance"),
        ("own chance for all", "has chance"),
    ],
)
def test_mutants_are_refused(fault: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accept(InBlocks(fault))


# --- block verification -----------------------------------------------------------------------------------------------
def drafts(
    pair: MarkovPair, n: int, count: int, seed: int = 0
) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Chains drawn from the draft: tokens, p ``[n + 1, V]``, q ``[n, V]``."""
    chance = torch.Generator().manual_seed(seed)
    for start in range(count):
        text, q = (start % pair.vocab, start), []
        for _ in range(n):
            q.append(pair.q(text))
            text = (*text, int(torch.multinomial(q[-1], 1, generator=chance)))
        yield text[2:], torch.stack([pair.p(text[: 2 + i]) for i in range(n + 1)]), torch.stack(q)


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_block_is_the_loop_of_the_paper(n: int, zeros: float) -> None:
    for tokens, p, q in drafts(MarkovPair(6, 2, sharp=2.0, zeros=zeros), n, 200):
        found = Block().outcomes(tokens, p, q)
        assert torch.allclose(found, InBlocks().outcomes(tokens, p, q), rtol=0, atol=1e-12)


def test_no_round_of_block_keeps_fewer_tokens_than_exact() -> None:
    """Expected over all drafts of a pair of chains (Sun et al. 2024, Theorem 2)."""
    gains = []
    for seed in range(60):
        pair = MarkovPair(3, seed, sharp=1.0 + seed % 3, zeros=0.3 * (seed % 2))
        kept = {"block": 0.0, "exact": 0.0}
        for tokens in itertools.product(range(3), repeat=3):
            p = torch.stack([pair.p((0, *tokens[:i])) for i in range(4)])
            q = torch.stack([pair.q((0, *tokens[:i])) for i in range(3)])
            drawn = math.prod(float(q[i, x]) for i, x in enumerate(tokens))
            if drawn > 0:
                for name, rule in (("block", Block()), ("exact", Walk())):
                    lengths = rule.outcomes(tokens, p, q).sum(-1)
                    kept[name] += drawn * float(lengths @ torch.arange(4.0, dtype=lengths.dtype))
        gains.append(kept["block"] - kept["exact"])
    assert min(gains) > -1e-12 and max(gains) > 0.05


def test_block_keeps_all_of_a_greedy_text_that_the_target_would_write() -> None:
    """Every prefix of it is 0/0."""
    laws = torch.eye(5, dtype=torch.float32)[[2, 4, 1, 3]]
    assert torch.equal(Block().outcomes((2, 4, 1), laws, laws[:3])[3], laws[3])
    other = laws.clone()
    other[1] = torch.eye(5)[0]
    found = Block().outcomes((2, 4, 1), other, laws[:3])
    assert torch.equal(found[1], other[1]) and float(found.sum()) == 1.0


@pytest.mark.parametrize(
    "stop",
    [*map(Fixed, (1, 2, 3, 4)), Svip(0.6), AdaEdl(), Heuristic(2), Calibrated(0.5), Optimal(0.1, 0.02)],
    ids=str,
)
def test_block_is_exact_under_stops_that_look_at_the_draft(stop: StopRule) -> None:
    """And under stops that learn from its verdicts; drafts of up to 4 tokens, zeros in both laws."""
    method = Method(stop=stop, accept=Block(), cap=4)
    for pair, length in ((MarkovPair(2, 13), 5), (MarkovPair(3, 12, sharp=2.0, zeros=0.35), 4)):
        found = joint_law(method, pair, length)
        check_same_law(found, target_joint_law(pair, length), f"block under {stop} on {pair}")


@pytest.mark.parametrize(
    "method",
    [
        Method(trust=Coin(0.5), stop=Untrusted(tail=2), accept=Block(), cap=4),
        Method(trust=Gate(0.5), stop=Untrusted(tail=1), accept=Block(), cap=3),
    ],
    ids=str,
)
def test_block_judges_what_a_trust_rule_leaves(method: Method) -> None:
    pair = MarkovPair(3, 5, distance=0.0)
    check_same_law(joint_law(method, pair, 3), target_joint_law(pair, 3), "block behind a trust rule")
    apart = MarkovPair(3, 5)  # the untrusted tokens keep p: where all are untrusted, the text does
    nobody = replace(method, trust=Nobody(), stop=Fixed(2))
    check_same_law(joint_law(nobody, apart, 3), target_joint_law(apart, 3), "block, nobody trusted")


def test_block_in_float32_is_a_law() -> None:
    """With a real vocabulary: the chances of a round's lengths sum to 1 within rounding."""
    chance = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(9, 50_000, generator=chance)
    p = logits.softmax(-1)
    q = (logits[:8] + torch.randn(8, 50_000, generator=chance)).softmax(-1)
    tokens = torch.multinomial(q, 1, generator=chance).squeeze(-1).tolist()
    ending, law_after = Block().ends(tokens, p, q)
    assert ending.dtype == torch.float64 and abs(float(ending.sum()) - 1) < 1e-12
    for k in ending.nonzero().flatten().tolist():
        assert law_after(k).dtype == torch.float32 and abs(float(law_after(k).sum()) - 1) < 1e-5
