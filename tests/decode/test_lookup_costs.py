"""Copies whose length follows from the costs of target passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sprinter.decode import Suffix, parse_method
from sprinter.decode.copies import _CHANCES, Worth
from sprinter.decode.costs import PassCosts
from sprinter.decode.drafter import Context, Drafter, Model, Nothing, Proposals
from sprinter.decode.lookup import Lookup
from sprinter.decode.suffix_index import TextIndex
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

READS = "1x1.1x1.6x3.5"
CYCLE = [1, 2, 3, 4, 5] * 3


def asked(text: list[int], round: int, at_most: int = 40) -> Context:
    return Context(text, round, at_most, 20, AddressedDraws(0), torch.ones(1))


def plan(proposals: Proposals, text: list[int], round: int, at_most: int = 40) -> list[int] | None:
    """All of a round's copy, asked for in parts."""
    found: list[int] = []
    while (part := proposals.ask(asked(text + found, round, at_most))) is not None and part.tokens:
        found += part.tokens
    return None if part is None else found


@pytest.mark.parametrize("size", [1, 2, 4, 8, 11])
@pytest.mark.parametrize("reads", [READS, "1.05x1.1x1.2x1.5", "1.5x2x4x8", "1x1x1x1"])
def test_each_copied_token_pays(size: int, reads: str) -> None:
    """The number of tokens against a direct reading of the rule's formula."""
    worth = Worth(Lookup(8, 1, Nothing(), reads=reads))
    cost = np.interp(range(1, 17), (1, 2, 4, 8, 16), [1.0, *map(float, reads.split("x"))])
    lowest = min(cost[k] / (k + 1) for k in range(16))
    wanted = 0
    for k in range(1, 16):
        chances = [_CHANCES[min(size + i, 8) - 1] for i in range(k)]
        own = chances[-1]
        if math.prod(chances) * (own * lowest + (1 - own) * 1.0) < cost[k] - cost[k - 1]:
            break
        wanted = k
    assert worth.paying(size, 511)[0] == wanted
    assert (wanted == 15) >= (reads == "1x1x1x1") and (wanted == 0) >= (reads == "1.5x2x4x8" and size < 3)


def test_the_draft_model_drafts_where_it_gains_more() -> None:
    cheap, dear = (Worth(Lookup(8, 1, Model(), reads=READS, step=step)) for step in (0.05, 3.0))
    assert cheap.paying(1, 511) == (0, 0.0) and dear.paying(1, 511)[0] == 2
    assert cheap.paying(8, 511) == dear.paying(8, 511) and dear.paying(8, 511)[0] == 7
    assert dear.paying(8, 3)[0] == 3 and dear.paying(8, 3)[1] < dear.paying(8, 511)[1]


def test_where_no_copy_can_pay_none_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As among many rows, whose passes cost about as much for each token."""
    text = [*CYCLE, 1, 2]
    for reads, wanted in (("2x4x8x16", None), ("1.1x1.2x1.4x1.8", [3, 4, 5])):
        suffix = Suffix(8, factor=64.0, min_prob=0.0, otherwise=Model(), reads=reads, step=0.3)
        assert Worth(suffix).never is (wanted is None)
        found = plan(Proposals(suffix), text, 1)
        assert found is None if wanted is None else found is not None and found[:3] == wanted
    assert Worth(Lookup(8, 1, Nothing(), reads="2x4x8x16")).never
    monkeypatch.setattr(TextIndex, "extend", lambda *_: pytest.fail("the text was read"))
    assert plan(Proposals(Suffix(8, otherwise=Model(), reads="2x4x8x16")), text, 1) is None


def test_chances_are_learned_from_the_text() -> None:
    """A copy that is kept makes later ones longer, one that is refused shorter; of each only what the text shows."""
    text, lookup = [*CYCLE, 1, 2], Lookup(8, 2, Nothing(), reads=READS)
    proposals = Proposals(lookup)
    first = plan(proposals, text, 1)
    assert first == ([3, 4, 5, 1, 2, 3, 4] * 2)[:7]
    refused, lengths = [*text], list[int]()
    for token in range(6, 16):
        refused = [*refused, token, 1, 2]  # the copy's first token is not kept
        found = plan(proposals, refused, token)
        assert found is not None
        lengths.append(len(found))
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] > 0
    worth = Worth(lookup)
    worth.copied = (3, [5, 6, 7, 8], 2)
    worth.learn([1, 2, 3, 5, 6, 9, 9])
    assert np.subtract(worth._tried, 6).tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    np.testing.assert_allclose(np.subtract(worth._kept, 6 * np.array(_CHANCES)), [0, 1, 1, 0, 0, 0, 0, 0])
    worth.learn([1, 2, 3, 5, 6, 9, 9])  # no verdict counts twice
    worth.copied = (3, [5, 6, 7, 8], 8)
    worth.learn([1, 2, 3, 5])  # the text does not show the others
    assert np.subtract(worth._tried, 6).tolist() == [0, 1, 1, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("otherwise", [Nothing(), Model()])
def test_a_plan_does_not_depend_on_how_it_is_asked_for(otherwise: Drafter) -> None:
    lookup = Lookup(8, 2, otherwise, reads=READS)
    texts = [CYCLE, [*CYCLE, 1, 2, 3], [*CYCLE, 1, 2, 3, 9, 1, 2], [7, 8, 9]]
    plans = []
    for at_most in (1, 3, 40):
        proposals = Proposals(lookup)
        plans.append([plan(proposals, text, round, at_most) for round, text in enumerate(texts, 1)])
    assert plans[0] == plans[1] == plans[2]
    assert plans[0][0] == [1, 2, 3, 4, 5, 1, 2] and plans[0][3] == (None if otherwise == Model() else [])


def test_costs_are_filled_in() -> None:
    costs = PassCosts(((1, 0.04), (2, 0.04), (4, 0.044), (8, 0.064), (16, 0.14)), ((1, 0.016), (8, 0.02)))
    assert costs.reads == "1x1.1x1.6x3.5"
    method = parse_method("auto").settle({}, costs)
    assert method.name == ("auto(step=0.4, token=0.056, verify=0.0, signal=entropy, reads=1x1.1x1.6x3.5)")
    copies = Suffix(8, factor=64.0, min_prob=0.0, otherwise=Model(), reads=READS, step=0.4)
    assert method.drafter == copies and not method.measures
    assert parse_method(method.name) == method
    only = parse_method("drafter=lookup(reads=measured),stop=never,cap=8")
    assert only.measures and only.settle({}, costs).drafter == Lookup(reads=READS)
    assert PassCosts(((1, 0.04), (16, 0.05))).reads == "1.02x1.05x1.12x1.25"


@pytest.mark.parametrize("reads", ["1x2", "1x2x3x2", "axbxcxd", "1x2x3x4x5", "0.5x1x2x3", "-1x1x1x1"])
def test_strange_costs_are_refused(reads: str) -> None:
    with pytest.raises(UserError, match=f"reads={reads} is out of range"):
        Lookup(reads=reads)
    with pytest.raises(UserError, match=r"step=-1"):
        Lookup(step=-1)


def test_a_copy_that_was_cut_is_not_continued_elsewhere() -> None:
    """A driver takes fewer tokens than were proposed, and another token stands there."""
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    proposals = Proposals(Lookup(3, 2, Nothing(), length=6))
    first = proposals.ask(asked(text, 1, 3))
    assert first is not None and list(first.tokens) == [3, 4, 5]
    again = proposals.ask(asked([*text, 3], 1, 3))  # cut behind its first token: it goes on from there
    assert again is not None and list(again.tokens) == [4, 5, 6]
    other = proposals.ask(asked([*text, 3, 9], 1, 3))
    assert other is not None and list(other.tokens) == []
