"""Token recycling, and chains of drafters: what is proposed, and the laws of texts by enumeration."""

from __future__ import annotations

import pytest
import torch
from tests.decode.chains import EOS, ends_at_eos, never_ends

from sprinter.decode import Drawn, Lookup, Model, Recycle, Suffix, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.draft import Scores
from sprinter.decode.draft_heads import Heads
from sprinter.decode.drafter import NOTHING, Allocated, Context, Drafter, Proposal, Proposals
from sprinter.decode.enumerate import MarkovPair, joint_law, target_joint_law
from sprinter.decode.successors import Successors
from sprinter.engine.backends.base import GreedyScores
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

DENSE, ZEROS = MarkovPair(seed=11), MarkovPair(seed=12, sharp=2.0, zeros=0.35)
READS = "1x1.1x1.2x1.5"
CHAINS = (
    "recycle(length=2)", "recycle(otherwise=model)", "suffix(otherwise=recycle(otherwise=model))",
    "lookup(n=1,least=1,length=2,otherwise=heads)",
    f"suffix(drawn=true,min_prob=0.0,factor=2.0,reads={READS},otherwise=lookup(n=2,least=1,reads={READS},otherwise=model))",
)  # fmt: skip


def after(*pairs: tuple[int, int]) -> Successors:
    """What was said after tokens, one law after the other."""
    made = Successors()
    for token, successor in pairs:
        made.note([token], [successor])
    return made


def proposal(drafter: Drafter, text: list[int], successors: Successors | None = None) -> Proposal | None:
    like = torch.empty(0, dtype=torch.float64)
    return Proposals(drafter).ask(Context(text, 1, 40, 20, AddressedDraws(0), like, successors=successors))


def tokens(drafter: Drafter, text: list[int], successors: Successors | None = None) -> list[int]:
    found = proposal(drafter, text, successors)
    assert found is not None
    assert torch.equal(found.laws.argmax(-1), torch.tensor(found.tokens, dtype=torch.int64))
    return list(found.tokens)


@pytest.mark.parametrize("accept", ["match", "exact", "block"])
@pytest.mark.parametrize("drafter", CHAINS)
def test_no_chain_changes_a_law(drafter: str, accept: str) -> None:
    method = parse_method(f"drafter={drafter},stop=fixed(gamma=3),accept={accept},cap=3")
    for pair, length, ends, prompt in (
        (DENSE, 3, never_ends, (2, 0, 1)), (ZEROS, 4, ends_at_eos, (1, EOS, 0)),
    ):  # fmt: skip
        wanted = target_joint_law(pair, length, ends=ends, prompt=prompt)
        check_same_law(joint_law(method, pair, length, ends=ends, prompt=prompt), wanted, f"{method}")


def test_the_last_law_after_a_token_counts() -> None:
    known = after((1, 2), (2, 3), (3, 1), (1, 5), (5, 9))
    assert tokens(Recycle(), [7, 1], known) == [5, 9]
    assert tokens(Recycle(), [2], known) == [3, 1, 5, 9]
    assert tokens(Recycle(length=2), [2], known) == [3, 1]
    assert tokens(Recycle(), [9], known) == tokens(Recycle(), [1]) == []
    cycle = after((1, 2), (2, 1))
    assert tokens(Recycle(), [1], cycle) == [2, 1, 2, 1]
    together = Successors()
    together.note([4, 4, 5], [6, 8])
    assert together.walk(4, 1) == [8], "of equal tokens the last one"
    assert together.walk(5, 1) == [], "no law stood behind it"


def test_what_is_likeliest_is_known_without_laws_where_it_is_drawn() -> None:
    """A plain greedy round makes no law; elsewhere the token that was drawn may be another."""

    def never() -> torch.Tensor:
        raise AssertionError("a law was made")

    assert GreedyScores(never, (7,), 7).likeliest == (7,)
    assert list(Scores(torch.eye(20)[[6, 8]], token=7).likeliest) == [6, 8]


def test_costs_bound_a_draft() -> None:
    cycle = after((1, 2), (2, 1))
    assert len(tokens(Recycle(reads="1x1x1x1"), [1], cycle)) == 4
    assert tokens(Recycle(reads="2x4x8x16"), [1], cycle) == []


def test_the_first_of_a_chain_that_has_a_draft_writes_it() -> None:
    known, text = after((2, 11), (4, 12)), [1, 2, 3, 4, 5, 1, 2]
    chain = Suffix(factor=0.5, otherwise=Recycle(otherwise=Lookup(1, 1, length=4)))
    assert tokens(chain, text, known) == [3], "the suffix"
    assert tokens(chain, [*text, 4], known) == [12], "the law after 4"
    assert tokens(chain, [*text, 5], known) == [1, 2, 5, 1], "the copy"
    assert tokens(chain, [*text, 9], known) == []
    assert proposal(Suffix(otherwise=Lookup(1, 1, Model())), [1, 2, 3]) is None, "the draft model"
    assert proposal(Suffix(otherwise=Lookup(1, 1, Heads())), [1, 2, 3]) is None, "heads"


def test_with_costs_the_draft_of_the_largest_gain_is_taken() -> None:
    known, text = after((2, 11)), [1, 2, 3, 4, 5, 6, 1, 2]
    for first, other in ((1, Lookup(8, 2, reads=READS)), (2, Recycle(reads=READS))):
        chain = Recycle(reads=READS, otherwise=other) if first == 1 else Lookup(8, 2, other, reads=READS)
        assert tokens(chain, text, known)[:2] == [3, 4], "an ending of two tokens promises more"
    assert tokens(Lookup(1, 1, Recycle(), reads=READS), text, known) == [11], "one without costs comes first"


def test_a_chain_is_named_in_one_way() -> None:
    made = parse_method("drafter=suffix(otherwise=recycle(otherwise=model(greedy=true))),stop=svip")
    drafter = made.drafter
    assert drafter == Suffix(otherwise=Recycle(otherwise=Model(greedy=True)))
    assert parse_method(made.name) == made
    assert drafter.greedy and drafter.uses_model and drafter.recycles and drafter.reads_earlier
    assert not Lookup().recycles and not Lookup(otherwise=NOTHING).uses_model
    assert Lookup(otherwise=Heads()).by_heads and Lookup(otherwise=Suffix()).reads_earlier


@pytest.mark.parametrize("last", [Drawn("2x1"), Model(drafts=2), Allocated(0.5), "model"])
def test_what_drafts_no_chains_ends_none(last: Drafter) -> None:
    with pytest.raises(UserError, match="give a drafter of chains"):
        Lookup(otherwise=last)
