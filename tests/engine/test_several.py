"""Several drafts in the engine: the room that a tree needs, and what is refused; drafters of other packages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.models.tiny import CONTEXT, tiny, word_tokenizer
from torch import Tensor

import sprinter
from sprinter.decode import (
    Batch,
    ChainRule,
    Context,
    Control,
    Drafter,
    Fixed,
    Method,
    Proposal,
    Proposer,
    Svip,
    check_drafter,
)
from sprinter.errors import SprinterError, UserError

PROMPT = [3, 1, 4]


def pair_of(target: str, draft: str = "llama") -> sprinter.Pair:
    return sprinter.load_pair(tiny(target), draft=tiny(draft), tokenizer=word_tokenizer(), compile=False)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return pair_of("qwen2")


def test_a_row_of_an_engine_has_room_for_a_tree_beside_the_text(pair: sprinter.Pair) -> None:
    """Also where the text fills the row, which is the draft's whole context."""
    options = {"method": "batch(drafts=8, gamma=8)", "max_new_tokens": CONTEXT - 3, "seed": 3}
    with sprinter.Engine(pair, rows=1, max_len=CONTEXT) as engine:
        number = engine.add(PROMPT, **options)  # type: ignore[arg-type]
        served = engine.finish()[number]
        with pytest.raises(
            UserError, match=r"batch\(drafts=8, gamma=20\) drafts a tree with 140 tokens beside"
        ):
            engine.add(PROMPT, method="batch(drafts=8, gamma=20)", max_new_tokens=8)
    assert ids(served) == ids(pair.generate(PROMPT, **options))  # type: ignore[arg-type]


def test_trees_beyond_a_forward_pass_are_refused(pair: sprinter.Pair) -> None:
    with pytest.raises(
        UserError, match="a tree of up to 800 tokens, and a forward pass reads fewer than 512"
    ):
        pair.generate(PROMPT, method="batch(drafts=8, gamma=100)", max_new_tokens=8)


def test_trees_end_where_a_rotary_embedding_changes() -> None:
    long = pair_of("llama-longrope")
    method = "batch(drafts=2, gamma=3)"
    short = long.generate(PROMPT, method=method, max_new_tokens=10, temperature=0.0)
    assert ids(short) == ids(
        long.generate(PROMPT, method="autoregressive", max_new_tokens=10, temperature=0.0)
    )
    with pytest.raises(UserError, match="exceed the context of the target"):
        long.generate(PROMPT, method=method, max_new_tokens=30)


class _By(Proposer):
    def __init__(self, function: Callable[[Context], Any]) -> None:
        self.propose = function  # type: ignore[method-assign,assignment]

    def propose(self, context: Context) -> Proposal | None:  # replaced above
        raise NotImplementedError


@dataclass(frozen=True)
class Turns(Drafter):
    """The next token id after an even one; the model drafts after an odd one."""

    def after(self, context: Context) -> Proposal | None:
        last = context.text[-1]
        return None if last % 2 else context.certain([(last + 1) % context.vocab])

    @property
    def proposer(self) -> Callable[[], Proposer]:
        return lambda: _By(self.after)


def test_turns_of_a_drafter_and_the_model_do_not_depend_on_what_is_drafted_ahead(pair: sprinter.Pair) -> None:
    check_drafter(Turns())
    method = Method(stop=Svip(0.9), drafter=Turns(), cap=6)
    texts = [
        ids(pair.generate(PROMPT, method=method, max_new_tokens=40, seed=5, ahead=ahead))
        for ahead in (1, 2, 4, "auto")  # type: ignore[arg-type]
    ]
    assert texts == texts[:1] * 4


@dataclass(frozen=True)
class Reads(Drafter):
    """Reads the target's states of some layers, and says the last token again."""

    target_states: tuple[int, ...] = (-1,)

    def again(self, context: Context) -> Proposal:
        assert all(context.states[layer].dim() == 2 for layer in self.target_states)
        return context.certain([context.text[-1]])

    @property
    def uses_model(self) -> bool:
        return False

    @property
    def proposer(self) -> Callable[[], Proposer]:
        return lambda: _By(self.again)


def test_states_are_there_after_a_prompt_of_one_token_and_in_the_check(pair: sprinter.Pair) -> None:
    method = Method(drafter=Reads(), stop=Fixed(2))
    assert method.needs_target
    assert len(pair.generate([7], method=method, max_new_tokens=6).tokens) == 6
    check_drafter(Reads())


def test_layers_that_the_target_does_not_have(pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="reads layer 7 of the target, which has layers 0 to 1"):
        pair.generate(PROMPT, method=Method(drafter=Reads((0, 7)), stop=Fixed(2)))


def test_several_drafts_are_the_models_alone() -> None:
    drafter = Turns()
    object.__setattr__(drafter, "drafts", 2)
    with pytest.raises(UserError, match="proposes by itself: give drafts=1"):
        Method(accept=Batch(), stop=Fixed(2), drafter=drafter)


@pytest.mark.parametrize(
    ("propose", "message"),
    [
        (lambda context: context.certain([context.vocab]), "proposed token id"),
        (lambda context: context.certain([0] * (context.at_most + 1)), "it was asked for at most"),
        (lambda context: context.certain([]), "proposed nothing, and says that it always proposes"),
    ],
)
def test_mistakes_of_a_drafter_are_one_line(
    pair: sprinter.Pair, propose: Callable[[Context], Proposal], message: str
) -> None:
    class Wrong(Drafter):
        @property
        def proposer(self) -> Callable[[], Proposer]:
            return lambda: _By(propose)

    with pytest.raises(SprinterError, match=message):
        pair.generate(PROMPT, method=Method(drafter=Wrong(), stop=Fixed(2)), max_new_tokens=8)


@dataclass(frozen=True)
class KeepsAll(ChainRule):
    """Lossy: every draft token stays."""

    def outcomes(self, tokens: Any, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        made = torch.zeros_like(p)
        made[-1] = p[-1]
        return made


@dataclass(frozen=True)
class Nothing(ChainRule):
    """No outcome has a chance."""

    def outcomes(self, tokens: Any, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        return torch.zeros_like(p)


@pytest.mark.parametrize("new", [20, 21])
def test_a_lossy_rule_of_chains_has_no_mean_drift(pair: sprinter.Pair, new: int) -> None:
    method = Method(accept=KeepsAll(), stop=Fixed(3))
    stats = pair.generate(PROMPT, method=method, max_new_tokens=new, meter="complete").stats
    assert stats.mean_drift is None and stats.accepted > 0 and "(one sample a round)" in stats.summary


def test_outcomes_that_are_no_law_are_one_line(pair: sprinter.Pair) -> None:
    with pytest.raises(SprinterError, match=r"chances of all outcomes sum to 0\.0, not 1"):
        pair.generate(PROMPT, method=Method(accept=Nothing(), stop=Fixed(2)), max_new_tokens=8)
