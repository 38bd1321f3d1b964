"""Signals: each against values computed by hand, and alike wherever they are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace

import pytest
import torch
from tests.decode.chains import TablePair
from torch import Tensor

from sprinter.decode import signals
from sprinter.decode.draft import AskDraft, Draft
from sprinter.decode.drafter import Context, Proposals
from sprinter.decode.enumerate import ChainDriver, MarkovPair
from sprinter.decode.lookup import Lookup
from sprinter.decode.method import Method
from sprinter.decode.rule_conformance import check_stop
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.signals import (
    GIVEN,
    HEADS,
    MARGIN_CAP,
    SIGNALS,
    TARGET_HEADS,
    given_by,
    prefix_signals,
    read_signals,
    signal,
)
from sprinter.decode.stop import StopRule
from sprinter.decode.trust import State
from sprinter.errors import UserError
from sprinter.heads.head import KINDS
from sprinter.kinds import HEAD_KINDS
from sprinter.random import AddressedDraws

RAW = [[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]]
LAW = [[2 / 3, 1 / 3, 0.0], [0.0, 1.0, 0.0]]
BY_HAND = {
    "entropy": [1.5 * math.log(2), 0.25 * math.log(8) + 0.75 * math.log(4 / 3)],
    "entropy_processed": [math.log(3) - 2 / 3 * math.log(2), 0.0],
    "max_prob": [0.5, 0.75],
    "max_prob_processed": [2 / 3, 1.0],
    "token_prob": [0.25, 0.75],
    "token_prob_processed": [1 / 3, 1.0],
    "margin": [math.log(2), math.log(6)],
    "margin_processed": [math.log(2), MARGIN_CAP],
}


@pytest.fixture
def tilt() -> Iterator[None]:
    """Two more signals: one that sees x and both laws, one that reads the state."""

    @signal()
    def tilt(law: Tensor, raw: Tensor, token: Tensor) -> Tensor:
        x = token[..., None]
        return (law.gather(-1, x) - raw.gather(-1, x))[..., 0]

    @signal(capture="never")
    def loudness(state: Tensor) -> Tensor:
        return state.abs().sum(-1)

    yield
    for name in ("tilt", "tilt_processed", "loudness", "loudness_processed"):
        del SIGNALS[name]


def test_every_signal_is_computed_by_hand_here() -> None:
    assert BY_HAND.keys() == SIGNALS.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BY_HAND)
def test_values_are_those_computed_by_hand(name: str, dtype: torch.dtype) -> None:
    law, raw, token = torch.tensor(LAW, dtype=dtype), torch.tensor(RAW, dtype=dtype), torch.tensor([1, 1])
    found = SIGNALS[name](law, raw, token)
    assert found.dtype == dtype
    accuracy = 1e-14 if dtype == torch.float64 else 1e-6
    assert found.tolist() == pytest.approx(BY_HAND[name], abs=accuracy)
    deep = SIGNALS[name](law.view(2, 1, 3), raw.view(2, 1, 3), token.view(2, 1))
    assert torch.equal(deep, found.view(2, 1)), "laws of any shape"
    assert torch.equal(SIGNALS[name](law[0], raw[0], token[0]), found[0])


def test_the_margin_is_the_difference_of_the_two_largest_logits() -> None:
    logits = torch.randn(200, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    first, second = logits.topk(2, -1).values.unbind(-1)
    law = torch.softmax(logits, -1)
    torch.testing.assert_close(signals.margin(law), first - second, rtol=0, atol=1e-12)
    torch.testing.assert_close(signals.margin(law.float()).double(), first - second, rtol=0, atol=1e-5)


def test_the_margin_is_finite_everywhere() -> None:
    tied = torch.tensor([0.4, 0.4, 0.2])
    assert float(signals.margin(tied)) == 0.0
    assert signals.margin(torch.ones(3, 1)).tolist() == [MARGIN_CAP] * 3, "a vocabulary of one token"
    assert signals.margin(torch.eye(4)).tolist() == [MARGIN_CAP] * 4
    for dtype in (torch.float32, torch.float64):  # beyond what float32 holds both agree
        law = torch.softmax(torch.tensor([0.0, -95.0, -300.0], dtype=dtype), -1)
        assert float(signals.margin(law)) == MARGIN_CAP
    assert torch.finfo(torch.float32).tiny < math.exp(-MARGIN_CAP)


def test_signals_say_what_they_read() -> None:
    assert {name for name, one in SIGNALS.items() if one.sees_token} == {"token_prob", "token_prob_processed"}
    assert {name for name, one in SIGNALS.items() if one.reads("raw")} == {
        "entropy",
        "max_prob",
        "token_prob",
        "margin",
    }
    assert prefix_signals() == SIGNALS.keys() - {"token_prob", "token_prob_processed"}
    always = {one.base for one in SIGNALS.values() if one.capture == "always"}
    assert always == {"entropy", "max_prob", "token_prob"}, (
        "methods that read no more share one captured unit"
    )
    for one in SIGNALS.values():
        low, high = one.span
        values = [value for value in BY_HAND[one.name] if value != MARGIN_CAP]
        assert low <= min(values) and max(values) <= high


def test_twins_of_one_law_are_computed_once(tilt: None) -> None:
    law, token = torch.tensor(LAW), torch.tensor([0, 1])
    made = read_signals(SIGNALS, law, law, token, torch.ones(2, 4))
    assert made.keys() == SIGNALS.keys()
    assert all(made[one.name] is made[one.base] for one in SIGNALS.values())
    apart = read_signals(("entropy", "entropy_processed"), law, torch.tensor(RAW))
    assert apart["entropy"].tolist() != apart["entropy_processed"].tolist()


def test_what_no_law_gives_is_described() -> None:
    assert given_by("head") == HEADS and HEADS | TARGET_HEADS == set(KINDS) == HEAD_KINDS.keys()
    assert {HEAD_KINDS[kind].model for kind in HEADS} == {"draft"} and HEADS.isdisjoint(TARGET_HEADS)
    assert (given_by("draws"), given_by("loop")) == ({"uniform"}, {"copied", "drafted", "trusted"})
    assert given_by("chain") == {"acceptable"}
    assert {name for name, one in GIVEN.items() if one.sees_token} == {"specdec++", "acceptable"}
    assert SIGNALS.keys().isdisjoint(GIVEN)


# --- wherever they are computed --------------------------------------------------------------------------------------
def test_enumeration_gives_every_signal(tilt: None) -> None:
    pair = TablePair(lambda text: RAW[0], lambda text: RAW[len(text) % 2], lambda text: len(text) / 8)
    driver = ChainDriver(pair, AddressedDraws(), 4)  # type: ignore[arg-type]
    draft = driver.answer(AskDraft(TokenSequence.begin((0, 1)), 4))
    assert isinstance(draft, Draft)
    laws, x = draft.laws, torch.tensor(draft.tokens)
    state = torch.tensor([[0.25], [0.375], [0.5], [0.625]], dtype=torch.float64)
    assert draft.signals.keys() == SIGNALS.keys() | HEADS
    for name, one in SIGNALS.items():
        assert draft.signals[name].tolist() == one(laws, laws, x, state).tolist()
    assert draft.signals["loudness"].tolist() == [0.25, 0.375, 0.5, 0.625]
    assert draft.signals["tilt_processed"].tolist() == [0.0] * 4


@pytest.mark.parametrize("vocab", [1, 2, 50])
def test_copied_tokens_have_the_signals_of_their_laws(vocab: int, tilt: None) -> None:
    drafter = Lookup(1, 1)
    context = Context([0, vocab - 1, 0], 1, 2, vocab, AddressedDraws(1), torch.empty(0))
    draft = Proposals(drafter).draft(context, SIGNALS.keys(), raw=False)
    assert draft is not None and draft.tokens == (vocab - 1, 0)
    assert draft.signals.keys() == SIGNALS.keys() - {"loudness", "loudness_processed"}
    for name, values in draft.signals.items():
        wanted = SIGNALS[name](draft.laws.double(), draft.laws.double(), torch.tensor(draft.tokens))
        assert values.dtype == torch.float64
        assert values.tolist() == wanted.tolist()
    assert draft.signals["margin"].tolist() == [MARGIN_CAP] * 2
    alone = replace(context, text=[0])
    nothing = Proposals(drafter).draft(alone, SIGNALS.keys(), raw=False)
    assert nothing is not None and all(values.shape == (0,) for values in nothing.signals.values())


@dataclass(frozen=True)
class Below(StopRule):
    """Stops below a threshold of any signal."""

    name: str = "margin"
    least: float = 1.0
    seeing: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.name})

    @property
    def sees_token(self) -> bool:
        return self.seeing

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals[self.name] < self.least, state


@pytest.mark.parametrize("name", ["margin", "margin_processed", "loudness"])
def test_rules_that_read_a_new_signal_pass_the_public_checks(name: str, tilt: None) -> None:
    check_stop(Below(name, 0.5))


@pytest.mark.parametrize("name", ["token_prob", "token_prob_processed", "tilt", "specdec++"])
def test_the_public_checks_know_which_signals_see_the_token(name: str, tilt: None) -> None:
    with pytest.raises(AssertionError, match="looks at x and does not say so"):
        check_stop(Below(name, 0.4))


def test_copied_drafts_refuse_rules_that_read_the_state(tilt: None) -> None:
    with pytest.raises(UserError, match="signal loudness reads the draft model's states"):
        Method(stop=Below("loudness"), drafter=Lookup())
    assert Method(stop=Below("margin"), drafter=Lookup()).needs == {"margin"}


# --- definitions that cannot be ---------------------------------------------------------------------------------------
def test_a_name_is_given_once_and_parameters_are_known() -> None:
    before = dict(SIGNALS)

    def entropy(law: Tensor) -> Tensor:
        return law.sum(-1)

    def novelty(law: Tensor, words: Tensor) -> Tensor:
        return law.sum(-1)

    with pytest.raises(ValueError, match="signal entropy is defined already"):
        signal()(entropy)
    with pytest.raises(ValueError, match="signal novelty reads words: give law, raw, token or state"):
        signal()(novelty)
    assert before == SIGNALS


def test_head_kinds_are_one_table() -> None:
    assert tuple(HEAD_KINDS) == KINDS == ("gate", "specdec++", "disco", "judge", "diversed")
    assert {field.name for field in fields(HEAD_KINDS["gate"])} == {"about", "sees_token", "model"}
    assert [kind for kind, one in HEAD_KINDS.items() if one.sees_token] == ["specdec++", "judge"]
    assert {kind for kind, one in HEAD_KINDS.items() if one.model == "target"} == TARGET_HEADS
    pair = MarkovPair(seed=2)
    draft = ChainDriver(pair, AddressedDraws()).answer(AskDraft(TokenSequence.begin((0,)), 1))
    assert isinstance(draft, Draft)
    assert float(draft.signals["specdec++"][0]) == pair.score("specdec++", (0, draft.tokens[0]))
    assert float(draft.signals["gate"][0]) == pair.score("gate", (0,))
