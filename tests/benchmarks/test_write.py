"""benchmarks/gpu/write.py: rows that begin again write what each prompt gives alone; what is asked, what is dropped."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from benchmarks.gpu.asks import asks
from benchmarks.gpu.write import Rows, Speech, cleaned, fault

import sprinter

ROOM = 24


def test_rows_that_begin_again_write_what_their_prompts_give_alone() -> None:
    pair = sprinter.load_pair(device="cpu", dtype="float32", runner="torch")
    before = [5, 9]
    prompts = [[*before, *range(11 + n, 14 + 2 * n)] for n in range(5)]
    target = pair.models.target
    rows = Rows(target, before, 2, ROOM, 0, 0.05, target.eos_ids)
    rows.step()  # as a capture does, while no row has a prompt
    todo, written = list(enumerate(prompts)), {}
    with torch.inference_mode():
        own: dict[int, int] = {}
        while todo or own:
            ended = rows.ended.nonzero()[:, 0].tolist()
            if done := [row for row in ended if row in own]:
                written |= {own.pop(row): ids for row, ids in zip(done, rows.take(done), strict=True)}
            new = [todo.pop(0) for _ in ended[: len(todo)]]
            if new:
                rows.begin(ended[: len(new)], [ids for _, ids in new])
                own |= dict(zip(ended, (number for number, _ in new), strict=False))
            for _ in range(3):
                rows.step()
    for number, prompt in enumerate(prompts):
        left = ROOM - len(prompt)
        alone = pair.generate(prompt, method="autoregressive", temperature=0.0, max_new_tokens=left)
        assert written[number] == [token.id for token in alone.tokens]


def test_draws_stay_within_the_likely_tokens_and_end_where_they_should() -> None:
    pair = sprinter.load_pair(device="cpu", dtype="float32", runner="torch")
    first = pair.generate([7, 8], method="autoregressive", temperature=0.0, max_new_tokens=1).tokens[0].id
    rows = Rows(
        pair.models.target, [7], 3, ROOM, 1.0, 1.0, (first,)
    )  # 1: nothing but the most probable token
    rows.begin([0, 1, 2], [[7, 8]] * 3)
    with torch.inference_mode():
        for _ in range(4):
            rows.step()
    assert rows.ended.all() and rows.take([0, 1, 2]) == [[first]] * 3


def test_asks_are_many_and_complete() -> None:
    given = list(islice(asks(3), 400))
    assert given == list(islice(asks(3), 400)) and len({one.words for one in given}) > 390
    assert {one.kind for one in given} == {"story", "fact", "question"}
    for one in given:
        assert not set("{}|\n") & set(one.words) and "  " not in one.words
        assert (one.kind == "question") == one.before.startswith("Question: ")


def test_prompts_without_a_template_begin_with_an_end_of_text() -> None:
    pair = sprinter.load_pair(device="cpu")
    assert pair.tokenizer is not None
    ask, ids = next(Speech.of(pair.tokenizer).prompts(asks(0)))
    assert ids[0] == pair.tokenizer.eos_token_id and pair.tokenizer.decode(ids[1:]) == ask.words


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("A fox lived in a garden. It was shy, and it liked the rain.", None),
        ("Too short.", "too short"),
        ("A fox lived in a garden. A fox lived in a garden. It was shy.", "repeats itself"),
        ("1. A fox lived in a garden.\n2. It was shy, and it liked the rain.", "marked up"),
        ("Sure, here is a story about a fox that lived in a garden.", "talks of itself"),
        ("Un renard vivait dans un jardin, et il aimait la neige d'été.", "not plain"),
        ("A fox lived in a garden. It was shy, and it liked", "no end of a sentence"),
    ],
)
def test_what_is_dropped(text: str, why: str | None) -> None:
    assert fault(text, True) == why
    assert fault(text, False) == "cut short"


def test_texts_are_written_in_ascii() -> None:
    assert cleaned(" “It’s late” — said Tom…\n\nHe slept. ") == '"It\'s late" - said Tom...\nHe slept.'
