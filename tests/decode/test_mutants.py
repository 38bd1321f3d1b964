"""Mistakes that are easy to make, each put in on purpose and caught by name; what it mutates passes the same check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tests.decode.chains import EOS, RecordingDraws, Remembers, TablePair, Text, Unsure, ids, listen, one_hot
from tests.tools import FALSE_ALARM, chi_square_p
from torch import Tensor

from sprinter.decode import enumerate as enumerating
from sprinter.decode.accept import AcceptRule, Exact, TargetCall, Verdict
from sprinter.decode.conformance import check_accept, check_same_law
from sprinter.decode.draft import AskDraft, Control, Draft
from sprinter.decode.enumerate import ChainDriver, MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.rule_conformance import check_stop
from sprinter.decode.spec import Method
from sprinter.decode.stop import Fixed, StopRule
from sprinter.decode.trust import State
from sprinter.errors import UserError
from sprinter.random import AddressedDraws, Draws, Purpose

PAIR = MarkovPair(seed=61)


def check_texts(method: Method, pair: MarkovPair = PAIR, length: int = 3) -> None:
    """The texts have the target's joint law."""
    check_same_law(joint_law(method, pair, length), target_joint_law(pair, length), "texts")


def sampled_p(
    method: Method,
    pair: Any,
    length: int,
    draws_of: Callable[[int], Draws],
    count: int,
    law: dict[Text, float],
) -> float:
    """p-value that ``count`` texts, drawn with real random numbers, have the law."""
    texts = Counter(
        ids(run_chain(method, pair, (0,), Limits(length), draws_of(seed))) for seed in range(count)
    )
    known = sorted(law.keys() | texts.keys())
    return chi_square_p([texts[text] for text in known], [law.get(text, 0.0) for text in known])


# --- accept rules ----------------------------------------------------------------------------------------------------
class AlwaysAccepts(Exact):
    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return torch.ones_like(p)


class AlwaysAcceptsAndTellsP(AlwaysAccepts):
    def law(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return p


class ResidualIsP(Exact):
    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return p


@pytest.fixture(scope="module")
def exact_passes() -> None:
    """What the mutants of this section mutate passes both checks."""
    check_accept(Exact())
    check_texts(Method(stop=Fixed(2)))


def check_mutated_rule(mutant: AcceptRule, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_accept(mutant)
    with pytest.raises(AssertionError, match="texts: text"):
        check_texts(Method(stop=Fixed(2), accept=mutant))


@pytest.mark.usefixtures("exact_passes")
def test_mutant_always_accept() -> None:
    check_mutated_rule(AlwaysAccepts(), r"drift is not TV\(π, p\)")


@pytest.mark.usefixtures("exact_passes")
def test_mutant_always_accept_that_tells_the_targets_law() -> None:
    check_mutated_rule(AlwaysAcceptsAndTellsP(), "law differs from q·b")


@pytest.mark.usefixtures("exact_passes")
def test_mutant_residual_is_p() -> None:
    check_mutated_rule(ResidualIsP(), r"drift is not TV\(π, p\)")


@pytest.mark.usefixtures("exact_passes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_mutant_half_precision(dtype: torch.dtype) -> None:
    """Laws rounded on the way into the rule fail the identity, float32 as well: tests need float64 to see slips."""

    class Rounds(Exact):
        def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
            return Exact.keep(self, p.to(dtype), q.to(dtype)).double()

        def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
            return Exact.replacement(self, p.to(dtype), q.to(dtype)).double()

    with pytest.raises(AssertionError):
        check_accept(Rounds())


@pytest.mark.usefixtures("exact_passes")
def test_mutant_half_precision_law_alone() -> None:
    """Chance and replacement in float64, the declared law in bfloat16."""

    class Rounds(Exact):
        def law(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
            return Exact.law(self, p, q).bfloat16().double()

    with pytest.raises(AssertionError, match="law differs from q·b"):
        check_accept(Rounds())


# --- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("slip", ["bonus", "all"])
def test_mutant_bonus_from_wrong_row(monkeypatch: pytest.MonkeyPatch, slip: str) -> None:
    """The bonus is drawn from the law one position too early; or every row is taken one position too early."""
    real = Exact.judge

    def one_row_early(rule: Any, call: TargetCall) -> Verdict:
        p, shifted = call.p, call.p.clone()
        if slip == "bonus" and len(p) > 1:
            shifted[-1] = p[-2]
        elif slip == "all":
            shifted[1:] = p[:-1]
        return real(rule, call._replace(p=shifted))

    method = Method(stop=Fixed(2))
    check_texts(method)
    monkeypatch.setattr(Exact, "judge", one_row_early)
    with pytest.raises(AssertionError, match="texts: text"):
        check_texts(method)


# --- laws ------------------------------------------------------------------------------------------------------------
class CutDriver(ChainDriver):
    """Drafts from a processed law, q without its least likely token, and reports the law ``reported`` to the loop."""

    reported = "processed"

    def answer(self, request: Any) -> Any:
        if not isinstance(request, AskDraft):
            return super().answer(request)
        pair = self._pair
        gate = partial(pair.score, "gate")
        self._pair = TablePair(pair.p, lambda text: self.cut(pair.q(text)), gate)  # type: ignore[assignment]
        draft = super().answer(request)
        self._pair = pair
        if self.reported == "processed":
            return draft
        text = tuple(request.sequence.tokens)
        raw = [pair.q((*text, *draft.tokens[:i])) for i in range(len(draft.tokens))]
        return Draft(draft.tokens, torch.stack(raw), draft.signals)

    @staticmethod
    def cut(law: Tensor) -> list[float]:
        kept = law.clone()
        kept[law.argmin()] = 0.0
        return (kept / kept.sum()).tolist()


class RawDriver(CutDriver):
    reported = "raw"


def test_mutant_raw_q_where_q_was_processed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting with top-k 2 and verifying against the raw softmax: the commonest mistake of all."""
    for stop in (Fixed(1), Fixed(3)):
        monkeypatch.setattr(enumerating, "ChainDriver", CutDriver)
        check_texts(Method(stop=stop))
        monkeypatch.setattr(enumerating, "ChainDriver", RawDriver)
        with pytest.raises(AssertionError, match="texts: text"):
            check_texts(Method(stop=stop))


# --- random numbers --------------------------------------------------------------------------------------------------
class InverseDraws(AddressedDraws):
    """Tokens by inversion of one uniform number, of which the address is open to mutation."""

    shared = False

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        if self.shared and purpose == Purpose.DRAFT:
            purpose = Purpose.ACCEPT
        u = self.uniform(round, position, purpose, row)
        return min(int((law.cumsum(-1) <= u).sum()), len(law) - 1)


class SharedDraws(InverseDraws):
    """Acceptance reuses the number that drew the token."""

    shared = True


class OnePurposeDraws(RecordingDraws):
    """Acceptance has the draft's address."""

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        return [self.uniform(round, position + i, Purpose.DRAFT, row) < b for i, b in enumerate(chances)]


@pytest.mark.statistical
def test_mutant_shared_random_numbers() -> None:
    """Enumeration takes draws as independent and cannot see this; sampling does.

    1,500 texts of two tokens: false alarm 1e-4 for the sound numbers, and the mutant is rejected at 1e-9.
    """
    method, law = Method(stop=Fixed(1)), target_joint_law(PAIR, 2)
    assert sampled_p(method, PAIR, 2, InverseDraws, 1500, law) > FALSE_ALARM
    assert sampled_p(method, PAIR, 2, SharedDraws, 1500, law) < 1e-9


def test_mutant_shared_random_numbers_by_address() -> None:
    """The address-reuse test sees it without a sample."""
    for kind, reused in ((RecordingDraws, False), (OnePurposeDraws, True)):
        draws = kind(AddressedDraws(1))
        listen(Method(stop=Fixed(3)), PAIR, Limits(9), draws)
        assert bool(draws.reused) is reused


class WithoutRound:
    """Leaves the round out of the address."""

    def __init__(self, inner: Draws) -> None:
        self._inner = inner

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        return self._inner.token(law, 0, position, purpose, row)

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        return self._inner.uniform(0, position, purpose, row)

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        return self._inner.keep(chances, 0, position, row)


@pytest.mark.parametrize("stop", [Fixed(3), Remembers(), Unsure()], ids=str)
def test_mutant_number_reused_across_rounds(stop: StopRule) -> None:
    """A position that is drafted again after a refusal gets its old number; the address-reuse test sees it."""
    caught = 0
    for seed in range(20):
        sound, recorded = RecordingDraws(AddressedDraws(seed)), RecordingDraws(AddressedDraws(seed))
        listen(Method(stop=stop), PAIR, Limits(12), sound)
        assert sound.reused == {}
        listen(Method(stop=stop), PAIR, Limits(12), WithoutRound(recorded))
        caught += bool(recorded.reused)
    assert caught >= 10


@pytest.mark.statistical
def test_mutant_number_reused_across_rounds_biases_a_stop_rule_with_memory() -> None:
    """The first draft token is always refused, so the second and third are dropped and drafted again.

    The rule stops earlier in the second run if the dropped third token was unlikely; then the third place is a bonus.
    With its old number the third token is thus the likely one whenever it is drafted: 0.91 instead of 0.7.
    400 texts: false alarm 1e-4 for the sound numbers, and the mutant is rejected at 1e-9.
    """
    coin = [0.7, 0.3]
    pair = TablePair(
        lambda text: [0.0, 1.0] if len(text) == 1 else coin,
        lambda text: [1.0, 0.0] if len(text) == 1 else coin,
    )
    texts = [(1, x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)]
    law = {text: coin[text[1]] * coin[text[2]] * coin[text[3]] for text in texts}
    method = Method(stop=Remembers(0.5))
    assert joint_law(method, pair, 4) == pytest.approx(law, abs=1e-12)  # type: ignore[arg-type]
    assert sampled_p(method, pair, 4, AddressedDraws, 400, law) > FALSE_ALARM
    assert sampled_p(method, pair, 4, lambda seed: WithoutRound(AddressedDraws(seed)), 400, law) < 1e-9


# --- discarding ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DiscardsByToken(StopRule):
    """Stops where q(x) < c and throws x away."""

    c: float = 0.4
    needs: ClassVar[frozenset[str]] = frozenset({"token_prob"})
    sees_token: ClassVar[bool] = True
    discards: ClassVar[bool] = True

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["token_prob"] < self.c, state


class DiscardsAndDenies(DiscardsByToken):
    """Declares that its decision does not depend on x, which is false."""

    sees_token = False


@dataclass(frozen=True, slots=True)
class DiscardsTheMode(DiscardsByToken):
    """Depends on x in a way that random signals never show: x is the draft's most likely token."""

    needs: ClassVar[frozenset[str]] = frozenset({"token_prob", "max_prob"})
    sees_token: ClassVar[bool] = False

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["token_prob"] == signals["max_prob"], state


def test_mutant_discarding_by_x() -> None:
    """Refused by name where it is admitted, and by its law of texts where it is not."""
    check_stop(Unsure(0.5))
    check_texts(Method(stop=Unsure(0.5)))
    with pytest.raises(UserError, match="discards a token that it looks at"):
        Method(stop=DiscardsByToken())
    with pytest.raises(AssertionError, match="discards a token that it looks at"):
        check_stop(DiscardsByToken())
    with pytest.raises(AssertionError, match="looks at x and does not say so"):
        check_stop(DiscardsAndDenies())
    with pytest.raises(AssertionError, match="has chance"):
        check_stop(DiscardsTheMode())
    for liar in (DiscardsAndDenies(), DiscardsTheMode()):
        with pytest.raises(AssertionError, match="texts: text"):
            check_texts(Method(stop=liar))


# --- the end of the text ---------------------------------------------------------------------------------------------
def test_mutant_end_seen_one_token_late() -> None:
    """The end is searched for before the newest token: greedy texts run past EOS."""
    chain = [0, 0, EOS, 0, 0, 0, 0]
    pair = TablePair(lambda text: one_hot(chain[len(text) - 1]), lambda text: one_hot(chain[len(text) - 1]))

    def write(ends: Callable[[Sequence[int]], str | None]) -> Text:
        return ids(listen(Method(stop=Fixed(4)), pair, Limits(6, ends))[0])

    assert write(lambda text: "eos" if text[-1] == EOS else None) == (0, 0, EOS)
    assert write(lambda text: "eos" if text[-2:-1] == [EOS] else None) == (0, 0, EOS, 0)
