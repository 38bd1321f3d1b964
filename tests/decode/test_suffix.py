"""Drafts from suffixes: what is proposed, and the laws of texts by enumeration."""

from __future__ import annotations

import pytest
import torch
from tests.decode.chains import EOS, ends_at_eos, never_ends

from sprinter.decode import Model, Suffix, check_drafter, parse_method
from sprinter.decode.conformance import check_same_law
from sprinter.decode.drafter import Context, Proposal
from sprinter.decode.enumerate import EnumeratedDraws, MarkovPair, joint_law, target_joint_law
from sprinter.decode.suffix_index import END, SuffixIndex
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

DENSE, ZEROS = MarkovPair(seed=11), MarkovPair(seed=12, sharp=2.0, zeros=0.35)
DRAFTERS = (
    Suffix(), Suffix(drawn=True), Suffix(otherwise=Model()), Suffix(3, factor=2.5, min_prob=0.6),
    Suffix(drawn=True, factor=4.0, min_prob=0.0, otherwise=Model()), Suffix(reads="1x1.1x1.2x1.5"),
    Suffix(drawn=True, otherwise=Model(), reads="1x1.1x1.2x1.5", step=0.6),
)  # fmt: skip


def earlier_texts() -> SuffixIndex:
    """Texts in which the same tokens go on in different ways."""
    index = SuffixIndex(200)
    for text in ((0, 1, 2, 0), (0, 1, 0, 0), (0, 1, 0, 2), (2, 0, 1, 1), (1, 0, 1, 2, 2)):
        index.extend(text)
        index.extend([END])
    return index


def proposal(
    drafter: Suffix, text: list[int], earlier: SuffixIndex | None = None, **given: object
) -> Proposal:
    draws = given.get("draws", AddressedDraws(0))
    context = Context(text, 1, 40, 20, draws, torch.empty(0, dtype=torch.float64), earlier=earlier)  # type: ignore[arg-type]
    found = drafter.proposer().propose(context)  # type: ignore[misc]
    assert found is not None
    return found


def tokens(drafter: Suffix, text: list[int], earlier: SuffixIndex | None = None) -> list[int]:
    return list(proposal(drafter, text, earlier).tokens)


@pytest.mark.parametrize("drafter", DRAFTERS, ids=str)
def test_drafters_are_sound(drafter: Suffix) -> None:
    check_drafter(drafter)


@pytest.mark.parametrize("accept", ["match", "exact", "block"])
@pytest.mark.parametrize("drafter", ["suffix", "suffix(drawn=true,min_prob=0.0)", "suffix(otherwise=model)"])
def test_earlier_texts_never_change_a_law(drafter: str, accept: str) -> None:
    method = parse_method(f"drafter={drafter},stop=fixed(gamma=3),accept={accept},cap=3")
    for pair, length, ends, prompt in (
        (DENSE, 3, never_ends, (0,)), (DENSE, 3, never_ends, (2, 0, 1)), (ZEROS, 4, ends_at_eos, (1, EOS, 0)),
    ):  # fmt: skip
        wanted = target_joint_law(pair, length, ends=ends, prompt=prompt)
        for earlier in (None, earlier_texts()):
            found = joint_law(method, pair, length, ends=ends, prompt=prompt, earlier=earlier)
            check_same_law(found, wanted, f"{method} with {earlier}")


def test_the_law_of_a_drawn_token_is_its_share() -> None:
    """Every path of draws: each token's law is what the occurrences that go on as the draft did show."""
    drafter, draws = Suffix(drawn=True, min_prob=0.0, factor=2.0), EnumeratedDraws()
    chances: dict[tuple[int, ...], float] = {}
    while True:
        made = proposal(drafter, [9, 0, 1], earlier_texts(), draws=draws)
        own = 1.0
        for token, law in zip(made.tokens, made.laws, strict=True):
            assert float(law.sum()) == pytest.approx(1)
            own *= float(law[token])
        assert own == pytest.approx(draws.weight)
        chances[tuple(made.tokens)] = draws.weight
        if not draws.next_path():
            break
    # 0 1 is followed by 2 0, 0 0, 0 2, 1 and 2 2
    wanted = {(2, 0): 0.2, (0, 0): 0.2, (0, 2): 0.2, (1,): 0.2, (2, 2): 0.2}
    assert chances == pytest.approx(wanted)


def test_the_most_frequent_token_is_drafted() -> None:
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 8, 1, 2, 3]
    assert tokens(Suffix(depth=3), text) == [5, 8, 1], "the latest of equally frequent ones, α times 3 tokens"
    assert tokens(Suffix(depth=3, factor=2.0), text) == [5, 8, 1, 2, 3, 5]
    assert tokens(Suffix(depth=3, length=1), text) == [5]
    assert tokens(Suffix(depth=3, least=3, min_prob=0.7), text) == [5], (
        "its share is 2/3, and the draft ends behind it"
    )
    assert tokens(Suffix(factor=0.5), [1, 2, 1, 2]) == [1]
    assert tokens(Suffix(), [1, 2, 3]) == []


def test_the_better_of_both_trees_is_taken() -> None:
    earlier = SuffixIndex(100)
    earlier.extend([4, 3, 1, 2, 7, 7, 7, 7])
    earlier.extend([END])
    assert tokens(Suffix(), [1, 2, 5, 6, 8, 4, 3, 1, 2], earlier) == [7, 7, 7, 7], "a longer match"
    assert tokens(Suffix(), [4, 3, 1, 2, 5, 6, 8, 9, 4, 3, 1, 2], earlier) == [5, 6, 8, 9], (
        "of equal ones its own"
    )
    assert tokens(Suffix(least=5), [4, 3, 1, 2], earlier) == []
    unsure = SuffixIndex(100)
    for token in (10, 11, 12):  # the pattern of four is followed by anything, the one of two always by 5
        unsure.extend([4, 3, 1, 2, token])
        unsure.extend([END])
    assert tokens(Suffix(), [1, 2, 5, 6, 8, 4, 3, 1, 2], unsure) == [5, 6]


def test_a_cycle_goes_on() -> None:
    assert tokens(Suffix(factor=4.0), [9, 1, 2, 3, 1, 2, 3, 1, 2]) == ([3, 1, 2] * 5)


def test_costs_bound_a_draft() -> None:
    text = [*range(10)] * 2
    cheap, dear = "1x1x1x1", "2x4x8x16"
    assert len(tokens(Suffix(reads=cheap), text)) == 10 > len(tokens(Suffix(reads="1x1.1x1.6x3.5"), text)) > 0
    assert tokens(Suffix(reads=dear), text) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("suffix(depth=1)", "depth=1"), ("suffix(factor=-1)", "factor=-1"), ("suffix(min_prob=2)", "min_prob=2"),
     ("suffix(length=0)", "length=0"), ("suffix(drawn=yes)", "drawn=yes"),
     ("drafter=suffix(otherwise=models)", "did you mean 'model'"), ("drafter=suffix(reads=1x2)", "reads=1x2")],
)  # fmt: skip
def test_strange_parameters_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text)
