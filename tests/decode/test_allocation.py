"""Random allocation: whole texts by the draft or by the target."""

from __future__ import annotations

import itertools

import pytest

from sprinter.decode.conformance import check_same_law
from sprinter.decode.draft import Origin
from sprinter.decode.drafter import Allocated
from sprinter.decode.enumerate import MarkovPair, joint_law, run_chain, target_joint_law
from sprinter.decode.loop import Limits
from sprinter.decode.spec import parse_method
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

PAIR = MarkovPair(seed=9)


def draft_joint_law(length: int) -> dict[tuple[int, ...], float]:
    law = {}
    for tokens in itertools.product(range(PAIR.vocab), repeat=length):
        chance = 1.0
        for i, x in enumerate(tokens):
            chance *= float(PAIR.q((0, *tokens[:i]))[x])
        law[tokens] = chance
    return law


@pytest.mark.parametrize(("share", "cells"), [(0.5, 2), (0.25, 4), (0.0, 2), (1.0, 2)])
def test_a_text_has_the_mixture_of_the_two_laws(share: float, cells: int):
    found = joint_law(parse_method(f"allocation(share={share})"), PAIR, 3, cells=cells)
    drafts, targets = draft_joint_law(3), target_joint_law(PAIR, 3)
    wanted = {text: share * drafts[text] + (1 - share) * targets[text] for text in drafts}
    check_same_law(found, wanted, f"allocation({share})")


def test_one_text_has_one_writer_and_the_target_is_called_only_for_its_own():
    writers = set()
    for seed in range(12):
        record = run_chain(parse_method("allocation(share=0.5)"), PAIR, (0,), Limits(8), AddressedDraws(seed))
        (writer,) = {token.origin for token in record.tokens}
        assert record.stats.target_calls == (0 if writer is Origin.TRUSTED else 8)
        writers.add(writer)
    assert writers == {Origin.TRUSTED, Origin.TARGET}


def test_drift_is_known_with_a_complete_meter():
    record = run_chain(
        parse_method("allocation(share=1.0)"), PAIR, (0,), Limits(8), AddressedDraws(0), complete=True
    )
    assert record.stats.drift_coverage == 1.0
    assert record.stats.mean_drift is not None
    assert record.stats.mean_drift > 0


def test_it_is_lossless_only_at_share_0():
    assert parse_method("allocation(share=0.0)").lossless()
    assert not parse_method("allocation(share=0.1)").lossless()
    with pytest.raises(UserError, match="share"):
        Allocated(1.5)
