"""Logits processors: against those of transformers and vLLM's definitions, along chains and trees, after rewinds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future

import pytest
import torch
from tests.decode.adjusted import adjusted
from tests.decode.grammars import ToyGrammar
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from sprinter.decode.adjust import Adjuster, Adjustments
from sprinter.decode.draft import Draft
from sprinter.errors import SprinterError, UserError

VOCAB = 11
PROMPT = [3, 1, 4, 1, 5, 9]
ALL = Adjustments(1.4, 0.3, -0.2, ((2, 1.5), (7, -3.0)), 4, (0, 6), ((8,), (1, 5), (5, 2, 7)))


def logits_of(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, VOCAB, generator=chance, dtype=torch.float64).to(dtype)


def after(settings: Adjustments, text: Sequence[int], logits: Tensor) -> Tensor:
    """The logits ``[1, V]`` after prompt and text."""
    adjuster = Adjuster(settings, PROMPT, VOCAB)
    adjuster.follow([*PROMPT, *text])
    return adjuster.after([()])(logits)


PROCESSORS: list[tuple[str, Adjustments, list[LogitsProcessor]]] = [
    ("repetition", Adjustments(1.7), [RepetitionPenaltyLogitsProcessor(1.7)]),
    ("repetition below 1", Adjustments(0.6), [RepetitionPenaltyLogitsProcessor(0.6)]),
    (
        "bias",
        Adjustments(logit_bias=((2, 1.5), (7, -3.0))),
        [SequenceBiasLogitsProcessor([[[2], 1.5], [[7], -3.0]])],
    ),
    (
        "bad words",
        Adjustments(bad_words=((8,), (1, 5), (5, 2, 7))),
        [NoBadWordsLogitsProcessor([[8], [1, 5], [5, 2, 7]])],
    ),
    (
        "least length",
        Adjustments(min_new_tokens=4, ends=(0, 6)),
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 4, [0, 6])],
    ),
    (
        "in transformers' order",
        Adjustments(1.3, 0.0, 0.0, ((1, 4.0), (3, -4.0)), 3, (0,), ((9, 2),)),
        [
            SequenceBiasLogitsProcessor([[[1], 4.0], [[3], -4.0]]), RepetitionPenaltyLogitsProcessor(1.3),
            NoBadWordsLogitsProcessor([[9, 2]]), MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [0]),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "theirs"), PROCESSORS, ids=[name for name, *_ in PROCESSORS])
@pytest.mark.parametrize("text", [[], [2, 2, 1], [9, 5, 2], [1, 7, 1, 5, 9]], ids=str)
def test_processors_of_transformers(
    name: str, settings: Adjustments, theirs: list[LogitsProcessor], text: list[int]
) -> None:
    logits = logits_of(1, len(text))
    wanted = LogitsProcessorList(theirs)(torch.tensor([[*PROMPT, *text]]), logits.clone())
    assert torch.equal(after(settings, text, logits), wanted)
    assert not torch.equal(wanted, logits) or name == "least length"


def test_penalties_of_openai_and_vllm() -> None:
    """logits -= frequency · counts + presence · (counts > 0), over new tokens alone."""
    logits, text = logits_of(1), [2, 2, 9, 1]
    counts = torch.bincount(torch.tensor(text), minlength=VOCAB)
    wanted = logits - 0.7 * counts - 0.4 * (counts > 0)
    found = after(Adjustments(presence_penalty=0.4, frequency_penalty=0.7), text, logits)
    torch.testing.assert_close(found, wanted)
    assert float(found[0, 4] - logits[0, 4]) == 0.0, "a token of the prompt alone"


def test_laws_of_half_precision_logits_are_adjusted_in_single() -> None:
    logits = logits_of(1, dtype=torch.bfloat16)
    found = after(Adjustments(1.3), [2], logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, after(Adjustments(1.3), [2], logits.float()))


def test_every_node_of_a_tree_has_its_own_text() -> None:
    text, tokens, parents = [2, 9], [9, 5, 1, 2, 5], [-1, 0, 0, 1, 2]
    adjuster = Adjuster(ALL, PROMPT, VOCAB)
    logits = logits_of(5, dtype=torch.float64)
    found = adjuster.along([*PROMPT, *text], 7, tokens, parents)(logits)
    paths = [[9], [9, 5], [9, 1], [9, 5, 2], [9, 1, 5]]
    for path, row, own in zip(paths, found, logits, strict=True):
        torch.testing.assert_close(row, adjusted(ALL, PROMPT, [2, *path], own), atol=1e-6, rtol=0)
    chain = adjuster.along([*PROMPT, *text], 7, tokens)(logits)
    for n, row in enumerate(chain):
        wanted = adjusted(ALL, PROMPT, [2, *tokens[: n + 1]], logits[n])
        torch.testing.assert_close(row, wanted, atol=1e-6, rtol=0)


def test_a_grammar_is_not_asked_about_an_empty_proposal() -> None:
    class Silent(ToyGrammar):
        def kept(self, text: Sequence[int], tokens: Sequence[int]) -> Future[int]:
            assert tokens
            return super().kept(text, tokens)

    adjuster = Adjuster(Adjustments(grammar=Silent(VOCAB)), PROMPT, VOCAB)
    nothing = Draft((), torch.empty(0, VOCAB), {}, proposed=True)
    assert adjuster.kept(nothing) is None and adjuster.allow(nothing) is nothing
    assert adjuster.kept(nothing._replace(tokens=(1,), laws=torch.eye(VOCAB)[[1]])) is not None


def test_the_prompts_last_token_is_no_new_token() -> None:
    """The target's first forward pass begins with it."""
    found = Adjuster(ALL, PROMPT, VOCAB).along(PROMPT, len(PROMPT) - 1, [PROMPT[-1], 2])(logits_of(2))
    for n, row in enumerate(found):
        torch.testing.assert_close(row, adjusted(ALL, PROMPT, [2][:n], logits_of(2)[n]))


def test_a_text_that_was_rewound_is_as_one_that_was_not() -> None:
    chance, text = random.Random(1), list(PROMPT)
    adjuster = Adjuster(ALL, PROMPT, VOCAB)
    for turn in range(60):
        start = chance.randint(max(len(PROMPT) - 1, len(text) - 4), len(text))
        text[start:] = [
            chance.randrange(VOCAB) for _ in range(max(len(PROMPT) - start, chance.randint(0, 4)))
        ]
        text[: len(PROMPT)] = PROMPT
        adjuster.follow(text)
        logits = logits_of(1, turn)
        wanted = adjusted(ALL, PROMPT, text[len(PROMPT) :], logits[0])
        torch.testing.assert_close(adjuster.after([()])(logits)[0], wanted)


def test_something_must_be_allowed() -> None:
    words = tuple((id,) for id in range(1, VOCAB))
    settings = Adjustments(min_new_tokens=1, ends=(0,), bad_words=words)
    adjuster = Adjuster(settings, PROMPT, VOCAB)
    with pytest.raises(UserError, match="every token is forbidden after 0 new tokens"):
        adjuster.after([()])
    adjuster.follow([*PROMPT, 2])
    assert adjuster.forbidden() == frozenset(range(1, VOCAB))


def test_copied_tokens_end_before_a_forbidden_one() -> None:
    adjuster = Adjuster(Adjustments(bad_words=((2, 7),)), PROMPT, VOCAB)
    laws = torch.eye(VOCAB)[[1, 2, 7, 4]]
    draft = Draft((1, 2, 7, 4), laws, {"entropy": torch.arange(4.0)}, laws)
    found = adjuster.allow(draft)
    assert (found.tokens, len(found.laws), found.signals["entropy"].tolist()) == ((1, 2), 2, [0.0, 1.0])
    assert found.raw is not None and len(found.raw) == 2
    assert adjuster.allow(Draft((1, 2, 4), laws[:3], {})).tokens == (1, 2, 4)
    with pytest.raises(SprinterError, match="the drafter drew token 7, which is forbidden here"):
        adjuster.allow(Draft((2, 7), torch.full((2, VOCAB), 1 / VOCAB), {}))


def test_nothing_to_adjust_is_false() -> None:
    assert not Adjustments() and not Adjustments(min_new_tokens=3) and not Adjustments(ends=(0,))
    assert (
        Adjustments(1.1) and Adjustments(logit_bias=((1, 1.0),)) and Adjustments(min_new_tokens=1, ends=(0,))
    )
