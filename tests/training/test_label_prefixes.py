"""Prefixes: which model writes which token; readings equal those of one plain forward pass over the text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from tests.models.tiny import VOCAB, fresh, tiny, word_tokenizer
from tests.tools import FALSE_ALARM, rate_p
from tests.training.labelling import laws_of, tiny_pair

import sprinter
from sprinter.errors import SprinterError
from sprinter.laws import Sampling, process
from sprinter.random import Purpose
from sprinter.training import prefixes
from sprinter.training.prefixes import PrefixRow, PrefixWriter, Readings

ORIGINAL, DRAFT, TARGET, INTERLEAVED = range(4)


def make_rows(lengths: Sequence[int], kinds: Sequence[int], new: int = 6) -> list[PrefixRow]:
    chance = random.Random(5)
    rows = []
    for i, (length, kind) in enumerate(zip(lengths, kinds, strict=True)):
        text = [chance.randrange(VOCAB) for _ in range(length + new)]
        rows.append(PrefixRow(3 * i, kind, tuple(text[:length]), tuple(text[length:])))
    return rows


def texts_of(rows: Sequence[PrefixRow], readings: Readings) -> list[list[int]]:
    return [[*row.ids, *tokens] for row, tokens in zip(rows, readings.tokens.tolist(), strict=True)]


def check_readings(pair: sprinter.Pair, rows: Sequence[PrefixRow], readings: Readings) -> None:
    for i, (row, text) in enumerate(zip(rows, texts_of(rows, readings), strict=True)):
        q, p, hidden = laws_of(pair, text)
        before = slice(len(row.ids) - 1, len(text) - 1)
        assert torch.allclose(readings.q[i].double(), q[before], atol=2e-4), (i, row.kind)
        assert torch.allclose(readings.p[i].double(), p[before], atol=2e-4), (i, row.kind)
        assert torch.allclose(readings.hidden[i], hidden[len(row.ids) - 1 :], atol=2e-4), (i, row.kind)


@pytest.mark.parametrize(
    ("lengths", "kinds"),
    [
        ([5, 1, 17, 9, 5, 30, 2, 8], [0, 1, 2, 3, 3, 2, 1, 0]),
        ([7] * 8, [0, 1, 2, 3] * 2),
        ([1, 1, 1, 1], [0, 1, 2, 3]),
        ([4, 6], [0, 0]),
        ([4, 6, 3], [1, 1, 1]),
        ([12], [3]),
    ],
)
def test_readings_are_those_of_a_plain_pass(lengths: list[int], kinds: list[int]) -> None:
    pair = tiny_pair()
    rows = make_rows(lengths, kinds)
    readings = PrefixWriter(pair.models, 0, 1.0)(rows)
    check_readings(pair, rows, readings)
    for i, row in enumerate(rows):
        if row.kind == ORIGINAL:
            assert tuple(readings.tokens[i].tolist()) == row.original


@pytest.mark.parametrize(
    ("target", "draft"), [("gpt_neo", "llama"), ("gemma2", "gpt_neo"), ("gpt_neox", "qwen2")]
)
def test_models_of_other_families_and_those_that_take_one_row(target: str, draft: str) -> None:
    pair = tiny_pair(target, draft)
    rows = make_rows([5, 1, 17, 9, 5, 12], [0, 1, 2, 3, 3, 2])
    check_readings(pair, rows, PrefixWriter(pair.models, 0, 1.0)(rows))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_every_completion_is_drawn_from_its_writers_law_at_its_own_address(temperature: float) -> None:
    pair, sampling = tiny_pair(), Sampling(temperature=temperature)
    rows = make_rows([5, 3, 17, 9, 5, 11], [1, 2, 3, 3, 1, 2], new=12)
    readings = PrefixWriter(pair.models, 4, temperature)(rows)
    writers = []
    for row, text in zip(rows, texts_of(rows, readings), strict=True):
        q, p, _ = laws_of(pair, text)
        draws = row.draws(4)
        for place in range(len(row.ids), len(text)):
            by_draft = row.kind == DRAFT or (
                row.kind == INTERLEAVED and draws.uniform(0, place, Purpose.TRUST) < 0.5
            )
            law = process((q if by_draft else p)[place - 1].float(), sampling)
            purpose = Purpose.DRAFT if by_draft else Purpose.TARGET
            assert text[place] == draws.token(law, 0, place, purpose)
            if row.kind == INTERLEAVED:
                writers.append(by_draft)
    assert len(set(writers)) == 2, "both models write in interleaved texts"


def test_the_answer_does_not_depend_on_the_company() -> None:
    """Alone or in any batch a row has the same tokens, and the same readings up to rounding."""
    pair = tiny_pair()
    rows = make_rows([5, 1, 17, 9, 5, 30, 2, 8], [0, 1, 2, 3, 3, 2, 1, 0])
    writer = PrefixWriter(pair.models, 0, 1.0)
    whole = writer(rows)
    for part in ([0, 1, 2], [7, 3, 4], [5], [6]):
        some = writer([rows[i] for i in part])
        assert torch.equal(some.tokens, whole.tokens[part])
        for name in ("q", "p", "hidden"):
            assert torch.allclose(getattr(some, name), getattr(whole, name)[part], atol=1e-4)


def test_a_step_gives_the_same_bits_whatever_ran_before() -> None:
    pair = tiny_pair()
    rows, others = make_rows([5, 1, 17, 9], [0, 1, 2, 3]), make_rows([60, 20, 70, 33], [0, 1, 2, 3])
    writer = PrefixWriter(pair.models, 0, 1.0)
    first = writer(rows)
    writer(others)
    writer(rows[:2])
    again = writer(rows)
    assert all(
        torch.equal(getattr(first, name), getattr(again, name)) for name in ("tokens", "q", "p", "hidden")
    )


def test_each_model_reads_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of one length: as many tokens go through each model as the texts have."""
    pair = tiny_pair()
    read, hooks = {"draft": 0, "target": 0}, []
    for which in read:

        def count(
            _: object, args: object, kwargs: dict[str, torch.Tensor], output: object, which: str = which
        ) -> None:
            read[which] += kwargs["input_ids"].numel()

        model = getattr(pair.models, which).model
        hooks.append(model.register_forward_hook(count, with_kwargs=True))
    rows = make_rows([9] * 8, [0, 1, 2, 3] * 2)
    monkeypatch.setattr(prefixes, "_AT_ONCE", 3)
    PrefixWriter(pair.models, 0, 1.0)(rows)
    for hook in hooks:
        hook.remove()
    # The last token is fed to the draft alone, whose state after it is recorded.
    assert read == {"draft": 8 * (9 + 6), "target": 8 * (9 + 5)}


@pytest.mark.statistical
def test_interleaved_texts_are_written_in_equal_parts() -> None:
    """The coin over 4,000 addresses, false-alarm rate 1e-4."""
    draws = [PrefixRow(i, INTERLEAVED, (1,), (1,)).draws(0) for i in range(200)]
    heads = sum(each.uniform(0, place, Purpose.TRUST) < 0.5 for each in draws for place in range(20))
    assert rate_p(heads, 4000, 0.5) > FALSE_ALARM


def test_a_model_that_breaks_down_is_named() -> None:
    draft = fresh("qwen2")
    pair = sprinter.load_pair(tiny("llama"), draft=draft, tokenizer=word_tokenizer())
    with torch.no_grad():
        draft.get_output_embeddings().weight.fill_(float("nan"))  # type: ignore[no-untyped-call, operator]
    with pytest.raises(SprinterError, match="the draft model's logits are NaN"):
        PrefixWriter(pair.models, 0, 1.0)(make_rows([3, 3], [0, 1]))
