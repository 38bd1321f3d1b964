"""Grammars in processes of their own say what they would say here, and what ends them ends no other."""

from __future__ import annotations

import os
import random
import signal

import numpy as np
import pytest

import sprinter
from sprinter.engine.grammar import Grammars
from sprinter.engine.grammar_process import GrammarProcess
from sprinter.engine.grammar_text import GrammarError, GrammarText, compiled

HARD = ("[a-c]{2,40}(river|rise)?", "(the |a )*(river|mountain) rises", r"[0-9]{1,3}(\.[0-9]+)?")


@pytest.fixture(scope="module")
def pair() -> sprinter.Pair:
    return sprinter.load_pair(compile=False)


@pytest.fixture
def grammars(pair: sprinter.Pair) -> Grammars:
    return Grammars(pair.tokenizer, pair.models.vocab_size)


def options(regex: str) -> sprinter.GenerationOptions:
    return sprinter.GenerationOptions(regex=regex)


@pytest.mark.parametrize("regex", HARD)
def test_a_process_says_what_this_one_would(pair: sprinter.Pair, grammars: Grammars, regex: str) -> None:
    asked = grammars._asked(options(regex))
    assert asked and pair.tokenizer is not None
    vocab, ends = pair.models.vocab_size, [int(pair.tokenizer.eos_token_id), 5]  # type: ignore[arg-type]
    own = grammars._tokens("regex")
    here, there = compiled(asked[1], own.tokens, vocab).copy(ends), own.processes.follow(asked[1]).copy(ends)
    pick, text = random.Random(3), tuple[int, ...]()
    for _ in range(12):
        wrong = (*text, pick.randrange(vocab))
        masks = here.masks([text, wrong])
        assert np.array_equal(masks, there.masks([text, wrong]))
        assert here.forced(text) == there.forced(text)
        allowed = np.flatnonzero(np.unpackbits(masks[0], bitorder="little")[:vocab])
        proposal = (*map(int, pick.choices(allowed.tolist(), k=2)), pick.randrange(vocab))
        assert here.kept(text, proposal) == there.kept(text, proposal)
        text = (*text, int(pick.choice(allowed)))


def test_hard_grammars_have_a_process_and_plain_ones_none(grammars: Grammars) -> None:
    hard = grammars.prepare(options(HARD[0]))
    plain = grammars.prepare(sprinter.GenerationOptions(response_format={"type": "json_object"}))
    assert hard and isinstance(hard._text, GrammarProcess) and hard.size >= 8 << 20
    assert plain and isinstance(plain._text, GrammarText)


def test_processes_that_are_ended_end_their_own_texts_alone(grammars: Grammars) -> None:
    processes = grammars._tokens("regex").processes
    asked = grammars._asked(options(HARD[0]))
    assert asked is not None
    text = processes.follow(asked[1]).copy([0])
    assert text.masks([()]).any()
    assert processes._first is not None
    os.killpg(processes._first[0].pid, signal.SIGKILL)
    processes._first[0].wait()
    with pytest.raises(GrammarError, match="cannot be followed on: it takes too long"):
        text.masks([()])
    assert processes.follow(asked[1]).copy([0]).masks([()]).any(), "others have a new one"
