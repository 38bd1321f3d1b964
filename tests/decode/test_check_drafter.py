"""check_drafter: every built-in drafter passes, and each way to be wrong is found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sprinter.decode.draft_heads import Heads
from sprinter.decode.drafter import Allocated, Context, Drafter, Model, Nothing, Proposal, Proposer
from sprinter.decode.drafter_conformance import check_drafter
from sprinter.decode.lookup import Lookup
from sprinter.decode.recycle import Recycle
from sprinter.decode.suffix import Suffix
from sprinter.random import Purpose

COUNT = itertools.count()


@dataclass(frozen=True)
class By(Drafter):
    """Proposes by a function of the context."""

    function: Callable[[Context], Any]
    own: bool = True  # without a draft model
    target: bool = True

    @property
    def uses_model(self) -> bool:
        return not self.own

    @property
    def needs_target(self) -> bool:
        return self.target

    @property
    def proposer(self) -> Callable[[], Proposer]:
        function = self.function

        class Calls(Proposer):
            def propose(self, context: Context) -> Proposal | None:
                return function(context)  # type: ignore[no-any-return]

        return Calls


def flat(context: Context) -> torch.Tensor:
    """The uniform law."""
    return torch.full((context.vocab,), 1 / context.vocab, dtype=torch.float64)


def drawn(context: Context) -> Proposal:
    """One token from the uniform law, by the right address."""
    law = flat(context)
    token = context.draws.token(law, context.round, len(context.text), Purpose.DRAFT)
    return Proposal([token], law[None])


def model_sometimes(context: Context) -> Proposal | None:
    """The draft model's turn after token 1."""
    return None if context.text[-1] == 1 else drawn(context)


@pytest.mark.parametrize(
    "drafter",
    [Model(), Model(greedy=True), Nothing(), Allocated(1.0), Lookup(2, 1), Lookup(2, 1, Model()),
     Recycle(), Recycle(otherwise=Model(greedy=True)), Suffix(otherwise=Recycle(otherwise=Lookup(1, 1, Model()))),
     Lookup(1, 1, Heads()), Lookup(2, 2, Recycle(Model(), 2, "1x1.1x1.2x1.5", 0.6), 3, "1x1.1x1.2x1.5", 0.6),
     Lookup(2, 1, By(drawn)), Lookup(2, 1, reads="1x1.1x1.2x1.5"),
     Lookup(2, 1, Model(), reads="1x1.1x1.2x1.5", step=0.6), By(drawn),
     By(model_sometimes, own=False), By(lambda context: context.certain([]))],
)  # fmt: skip
def test_sound_drafters_pass(drafter: Drafter) -> None:
    check_drafter(drafter)


def chosen(context: Context) -> Proposal:
    """Always token 0, said to be drawn from the uniform law: texts are biased."""
    return Proposal([0], flat(context)[None])


def impure(context: Context) -> Proposal:
    """Another token each time that it is asked."""
    return context.certain([next(COUNT) % context.vocab])


def too_long(context: Context) -> Proposal:
    return context.certain([0] * (context.at_most + 1))


def no_law(context: Context) -> Proposal:
    return Proposal([0], 2 * flat(context)[None])


def impossible(context: Context) -> Proposal:
    return Proposal([1], context.certain([0]).laws)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (By(chosen), "has chance"),
        (By(impure), "one time and"),
        (By(too_long), "asked for"),
        (By(no_law), "sums to 1 only within"),
        (By(impossible), "has no chance in the law"),
        (By(model_sometimes), "says uses_model=False"),
        (By(lambda context: context.certain([]), target=False), "says needs_target=False"),
        (By(lambda context: Proposal([0], flat(context)[None, :1])), "laws have shape"),
    ],
)
def test_each_way_to_be_wrong_is_found(drafter: Drafter, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_drafter(drafter)
