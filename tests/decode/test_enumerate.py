"""The chain pair, its driver, and the enumeration of draws."""

from __future__ import annotations

import pytest
import torch
from tests.decode.chains import EOS, Text, ends_at_eos

from sprinter.decode.draft import AskDraft, AskScore, Draft, Scores
from sprinter.decode.enumerate import ChainDriver, EnumeratedDraws, MarkovPair, joint_law, target_joint_law
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method, parse_method
from sprinter.laws import entropy
from sprinter.random import AddressedDraws, Purpose

PREFIXES: list[Text] = [(0,), (1,), (0, 0), (0, 1), (1, 0), (2, 1, 0), (0, 0, 0, 0)]


@pytest.mark.parametrize("zeros", [0.0, 0.4, 1.0])
def test_a_pair_gives_laws_that_depend_on_the_whole_prefix(zeros: float) -> None:
    pair = MarkovPair(seed=5, zeros=zeros)
    laws = [law for prefix in PREFIXES for law in (pair.p(prefix), pair.q(prefix))]
    for law in laws:
        assert law.dtype == torch.float64
        assert float(law.sum()) == pytest.approx(1, abs=1e-15)
    if zeros == 0.0:
        assert len({tuple(law.tolist()) for law in laws}) == len(laws)
    if zeros == 1.0:
        assert all(law.tolist() == [1, 0, 0] for law in laws)
    if zeros == 0.4:
        assert any((pair.p(prefix) > 0).tolist() != (pair.q(prefix) > 0).tolist() for prefix in PREFIXES)


def test_a_pair_is_its_seed() -> None:
    one, again, other = MarkovPair(seed=1), MarkovPair(seed=1), MarkovPair(seed=2)
    for prefix in PREFIXES:
        assert torch.equal(one.p(prefix), again.p(prefix)) and torch.equal(one.q(prefix), again.q(prefix))
        assert not torch.equal(one.p(prefix), other.p(prefix))
        assert one.score("gate", prefix) == again.score("gate", prefix) != other.score("gate", prefix)
        assert 0 <= one.score("gate", prefix) < 1


def test_distance_moves_the_draft_from_the_target() -> None:
    apart, half, same = (MarkovPair(seed=3, distance=distance) for distance in (1.0, 0.5, 0.0))
    for prefix in PREFIXES:
        assert torch.equal(same.q(prefix), same.p(prefix))
        torch.testing.assert_close(half.q(prefix), (apart.p(prefix) + apart.q(prefix)) / 2)


# --- enumerated draws ------------------------------------------------------------------------------------------------
def test_every_path_is_taken_once_with_its_chance() -> None:
    first, second = torch.tensor([0.5, 0.0, 0.5]).double(), torch.tensor([0.25, 0.75, 0.0]).double()
    draws, found = EnumeratedDraws(), {}
    while True:
        path = [draws.token(first, 1, 1, Purpose.DRAFT)]
        if path[0] == 2:
            path.append(draws.token(second, 1, 2, Purpose.DRAFT))
        assert tuple(path) not in found
        found[tuple(path)] = draws.weight
        if not draws.next_path():
            break
    assert found == {(0,): 0.5, (2, 0): 0.125, (2, 1): 0.375}


def test_uniform_numbers_are_midpoints_of_cells() -> None:
    draws, found = EnumeratedDraws(cells=4), []
    while True:
        found.append((draws.uniform(1, 1, Purpose.TRUST), draws.weight))
        if not draws.next_path():
            break
    assert found == [(0.125, 0.25), (0.375, 0.25), (0.625, 0.25), (0.875, 0.25)]


def test_keep_enumerates_up_to_the_first_refusal() -> None:
    draws, found = EnumeratedDraws(), {}
    while True:
        kept = tuple(draws.keep([1.0, 0.25, 0.5, 0.0], 1, 1))
        found[kept] = draws.weight
        if not draws.next_path():
            break
    refusals = {
        (True, False, False, False): 0.75,
        (True, True, False, False): 0.125,
        (True, True, True, False): 0.125,
    }
    assert found == refusals


# --- laws of texts ---------------------------------------------------------------------------------------------------
def test_the_targets_joint_law_is_a_product() -> None:
    pair = MarkovPair(seed=6, zeros=0.3)
    law = target_joint_law(pair, 2, prompt=(1, 0))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    for (x, y), chance in law.items():
        assert chance == pytest.approx(float(pair.p((1, 0))[x] * pair.p((1, 0, x))[y]), abs=1e-15)
        assert chance > 0


def test_the_targets_joint_law_knows_ends() -> None:
    pair = MarkovPair(seed=6)
    law = target_joint_law(pair, 3, ends=ends_at_eos)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert len(law) == 1 + 2 + 4 * 3  # EOS first, EOS second, three tokens
    assert law[EOS,] == pytest.approx(float(pair.p((0,))[EOS]), abs=1e-15)
    assert all(EOS not in text[:-1] for text in law)


def test_plain_decoding_enumerates_to_the_targets_joint_law() -> None:
    pair = MarkovPair(seed=7, vocab=4)
    found, wanted = joint_law(parse_method("autoregressive"), pair, 3), target_joint_law(pair, 3)
    assert found.keys() == wanted.keys()
    assert max(abs(found[text] - wanted[text]) for text in found) < 1e-15


# --- the driver ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ahead", "at_most", "count"), [(1, 5, 1), (3, 5, 3), (16, 5, 5), (2, 1, 1)])
def test_the_driver_drafts_ahead_within_what_is_asked(ahead: int, at_most: int, count: int) -> None:
    pair, prompt = MarkovPair(seed=8), (0, 1)
    driver = ChainDriver(pair, AddressedDraws(), ahead)
    draft = driver.answer(AskDraft(first_round((0, 1)), at_most))
    assert isinstance(draft, Draft)
    assert len(draft.tokens) == count
    for i, x in enumerate(draft.tokens):
        prefix = prompt + draft.tokens[:i]
        law = pair.q(prefix)
        assert torch.equal(draft.laws[i], law)
        wanted = {
            "entropy": entropy(law),
            "max_prob": law.max(),
            "token_prob": law[x],
            "gate": pair.score("gate", prefix),
            "disco": pair.score("disco", prefix),
            "specdec++": pair.score("specdec++", (*prefix, x)),
        }
        for name, value in wanted.items():
            assert float(draft.signals[name][i]) == pytest.approx(float(value), abs=1e-15)


def first_round(tokens: tuple[int, ...]) -> TokenSequence:
    sequence = TokenSequence.begin(tokens)
    sequence.round = 1
    return sequence


def test_the_driver_drafts_behind_a_text_and_scores_each_position() -> None:
    pair, sequence = MarkovPair(seed=8), first_round((0, 1))
    driver = ChainDriver(pair, AddressedDraws(), 4)
    first = driver.answer(AskDraft(sequence, 4)).tokens[0]
    assert first == AddressedDraws().token(pair.q((0, 1)), 1, 2, Purpose.DRAFT)
    sequence.tokens += (first, 2)
    again = driver.answer(AskDraft(sequence, 1))
    assert torch.equal(again.laws[0], pair.q((0, 1, first, 2)))
    sequence.cut(2)
    sequence.tokens.append(0)
    scores = driver.answer(AskScore(sequence, 1, 3))
    assert isinstance(scores, Scores) and scores.raw is None
    assert torch.equal(scores.laws, torch.stack([pair.p((0, 1)), pair.p((0, 1, 0))]))
    tree = driver.answer(AskScore(sequence, 2, 3, (2, 1, 0), (-1, -1, 1)))
    wanted = [(0, 1, 0), (0, 1, 0, 2), (0, 1, 0, 1), (0, 1, 0, 1, 0)]
    assert torch.equal(tree.laws, torch.stack([pair.p(text) for text in wanted]))


def test_a_target_pass_over_nothing_is_refused() -> None:
    with pytest.raises(AssertionError, match="a target pass over nothing"):
        ChainDriver(MarkovPair(), AddressedDraws()).answer(AskScore(first_round((0, 1)), 1, 1))


def test_the_driver_gives_raw_laws_if_asked() -> None:
    driver = ChainDriver(MarkovPair(), AddressedDraws(), needs_raw=True)
    sequence = first_round((0, 1))
    draft, scores = driver.answer(AskDraft(sequence, 1)), driver.answer(AskScore(sequence, 1, 2))
    assert draft.raw is not None and scores.raw is not None
    assert Method().accept.needs_raw is False
