"""The target call's verdict on one chain."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest
import torch
from tests.decode.chains import one_hot
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Exact, Lenient, Mentored, TargetCall, Verdict
from sprinter.decode.draft import Control
from sprinter.decode.enumerate import EnumeratedDraws, MarkovPair, run_chain
from sprinter.decode.loop import Limits
from sprinter.decode.sequence import Tree
from sprinter.decode.spec import Method
from sprinter.decode.stop import Fixed
from sprinter.laws import tv_distance
from sprinter.random import AddressedDraws, Purpose


class GivenDraws:
    """Draws with given decisions, which record the questions."""

    def __init__(self, kept: list[bool]) -> None:
        self.kept = kept
        self.chances: list[float] = []
        self.law: list[float] = []
        self.addresses: list[tuple[int, int]] = []

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        assert purpose == Purpose.TARGET
        self.law = law.tolist()
        self.addresses.append((round, position))
        return int(law.argmax())

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        raise AssertionError("the verdict needs no uniform number of its own")

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        self.chances = list(chances)
        self.addresses.append((round, position))
        return self.kept


Q = [torch.tensor(law, dtype=torch.float64) for law in ([0.6, 0.2, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5])]
P = torch.tensor([[0.3, 0.5, 0.2], [0.4, 0.4, 0.2], [0.0, 0.5, 0.5], [0.1, 0.2, 0.7]], dtype=torch.float64)
CHAIN = Tree((0, 1, 2), Q)


@pytest.mark.parametrize(
    ("kept", "accepted", "law"),
    [
        ([True, True, True], 3, [0.1, 0.2, 0.7]),  # bonus, from the row after the last
        ([False, True, True], 0, [0.0, 1.0, 0.0]),
        ([True, False, True], 1, [0.75, 0.0, 0.25]),
        ([True, True, False], 2, [0.0, 1.0, 0.0]),
    ],
)
def test_the_verdict(kept: list[bool], accepted: int, law: list[float]) -> None:
    draws = GivenDraws(kept)
    verdict = Exact().judge(TargetCall(CHAIN, P, None, draws, 4, 17))
    assert draws.chances == pytest.approx([0.5, 0.5, 1.0])
    assert verdict.accepted == accepted
    assert draws.law == pytest.approx(law)
    assert verdict.token == max(range(3), key=lambda x: law[x])
    assert verdict.drifts == [0.0] * 4
    assert draws.addresses == [(4, 17), (4, 17 + accepted)]


def test_nothing_to_judge() -> None:
    draws = GivenDraws([])
    verdict = Exact().judge(TargetCall(Tree(), P[:1], None, draws, 2, 9))
    assert verdict == Verdict((), 1, [0.0])
    assert draws.law == P[0].tolist()
    assert draws.addresses == [(2, 9)]


class Half(AcceptRule):
    """b = 1/2, r = p; says nothing of being lossless."""

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return torch.full_like(q, 0.5)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return p


def test_the_drift_of_a_lossy_rule_is_its_own() -> None:
    verdict = Half().judge(TargetCall(CHAIN, P, None, GivenDraws([True, True, True]), 1, 1))
    wanted = [float(tv_distance(Half().law(p, q), p)) for p, q in zip(P, Q, strict=False)]
    assert min(wanted) > 0.05
    assert verdict.drifts == pytest.approx([*wanted, 0.0])


class Watches(Exact):
    """Exact, and asserts that it gets raw and processed laws; the raw ones are those with tokens exchanged."""

    needs_raw = True

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        assert control is not None
        assert torch.equal(control.p, p.flip(-1)) and torch.equal(control.q, q.flip(-1))
        return super().keep(p, q, control)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        assert control is not None
        assert torch.equal(control.p, p.flip(-1)) and torch.equal(control.q, q.flip(-1))
        return super().replacement(p, q, control)


@pytest.mark.parametrize("kept", [[True, True, True], [True, False, True], [False, True, True]])
def test_raw_laws_stand_beside_the_processed_ones(kept: list[bool]) -> None:
    chain = Tree((0, 1, 2), Q, [q.flip(-1) for q in Q])
    verdict = Watches().judge(TargetCall(chain, P, P.flip(-1), GivenDraws(kept), 1, 1))
    assert verdict.accepted == [*kept, False].index(False)


class SameControl(Watches):
    """As ``Watches``, where raw and processed laws are equal."""

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        assert control is not None and torch.equal(control.p, p) and torch.equal(control.q, q)
        return Exact().keep(p, q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        assert control is not None and torch.equal(control.p, p) and torch.equal(control.q, q)
        return Exact().replacement(p, q)


@pytest.mark.parametrize("ahead", [1, 3])
def test_raw_laws_travel_through_the_loop(ahead: int) -> None:
    """The chain driver's raw laws are its laws, so rows that slip show."""
    pair = MarkovPair(seed=51)
    for seed in range(20):
        record = run_chain(
            Method(stop=Fixed(3), accept=SameControl()),
            pair,
            (0,),
            Limits(9),
            AddressedDraws(seed),
            ahead=ahead,
        )
        assert len(record.tokens) == 9


def test_a_token_that_the_target_forbids_is_never_kept() -> None:
    p = torch.tensor([one_hot(1), one_hot(2)], dtype=torch.float64)
    draws = EnumeratedDraws()
    chain = Tree((0,), [torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)])
    verdict = Exact().judge(TargetCall(chain, p, None, draws, 1, 1))
    assert (verdict.accepted, verdict.token) == (0, 1)
    assert not draws.next_path()


def test_a_lossy_rule_is_solved_once_a_call(monkeypatch: pytest.MonkeyPatch):
    """mentored finds b and r in one search: keeping, replacing and metering share it."""
    calls = []
    solve = Mentored._solve
    monkeypatch.setattr(Mentored, "_solve", lambda self, p, q: calls.append(1) or solve(self, p, q))
    chance = torch.Generator().manual_seed(1)
    p, q = torch.softmax(3 * torch.randn(2, 4, 6, generator=chance, dtype=torch.float64), -1)
    chain = Tree((0, 1, 2), list(q[:3]), [])
    verdict = Mentored(0.05).judge(TargetCall(chain, p, None, AddressedDraws(3), 1, 5))
    assert len(calls) == 1
    assert verdict.drifts[:3] == Mentored(0.05).drift(p[:3], q[:3]).tolist()


def test_the_chances_at_the_draft_tokens_are_those_of_the_whole_laws() -> None:
    """Exact reads p and q at the draft tokens alone; with a float32 law of a large vocabulary the same bits."""
    chance = torch.Generator().manual_seed(2)
    p, q = (torch.randn(2, 6, 5000, generator=chance) * 3).softmax(-1)
    tokens = torch.multinomial(q, 1, generator=chance).squeeze(-1).tolist()
    for rule in (Exact(), Lenient(1.0)):
        whole = rule.keep(p, q).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.equal(rule.keep_tokens(tokens, p, list(q)), whole)
    with warnings.catch_warnings(action="error"):  # p/q is larger than float32 can hold
        assert Exact().keep_tokens(
            [0], torch.tensor([[0.9, 0.1]]), [torch.tensor([1e-45, 1.0])]
        ).tolist() == [1.0]
