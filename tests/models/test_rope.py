"""Rotary embeddings that depend on a text's length: every law is that of the uncached pass over its own prefix."""

import logging
import random

import pytest
import torch
from tests.models.tiny import CONTEXT, SWITCH, fresh, tiny, uncached, word_tokenizer
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models import choose
from sprinter.models.pair import load_models
from sprinter.models.runner import Runner, make_runner, runner_kind
from sprinter.models.runners.rope import Switch, find_switch
from sprinter.models.runners.row import RowRunner
from sprinter.models.runners.switch import FarRunner, SwitchRunner

TWO_ROPES = ["phi3", "phi3-sliding", "phimoe", "llama-longrope"]


class Prefixes:
    """A runner whose logits and states are each compared with the last ones of a pass over that very prefix.

    (``told.Told`` compares with one pass over the row, whose early states are those of a long text.)
    """

    def __init__(self, runner: Runner, model: PreTrainedModel, seed: int = 0) -> None:
        self.runner, self.model, self.random = runner, model, random.Random(seed)
        self.texts: list[list[int]] = [[] for _ in range(runner.batch)]

    def extend(self, counts: list[int], rows: list[int] | None = None, *, logits: bool = True) -> None:
        numbers = list(range(self.runner.batch)) if rows is None else rows
        n = max(1, *counts)
        tokens = [[self.random.randrange(self.model.config.vocab_size) for _ in range(n)] for _ in counts]
        step = self.runner.extend(torch.tensor(tokens), counts, logits=logits, rows=rows)
        for i, (row, count) in enumerate(zip(numbers, counts, strict=True)):
            text = self.texts[row]
            for at in range(count):
                text.append(tokens[i][at])
                said, hidden = uncached(self.model, text)
                torch.testing.assert_close(step.hidden[i, at], hidden[-1], rtol=1e-4, atol=1e-4)
                if step.logits is not None:
                    torch.testing.assert_close(step.logits[i, at], said[-1], rtol=1e-4, atol=1e-3)
        assert self.runner.lengths == [len(text) for text in self.texts]

    def rewind(self, lengths: list[int]) -> None:
        self.runner.rewind(lengths)
        self.texts = [text[:length] for text, length in zip(self.texts, lengths, strict=True)]

    def copy(self, from_row: int, to_rows: list[int]) -> None:
        self.runner.copy(from_row, to_rows)
        for row in to_rows:
            self.texts[row] = list(self.texts[from_row])


@pytest.mark.parametrize("kind", TWO_ROPES)
def test_one_row_through_the_switch(kind: str) -> None:
    row = Prefixes(make_runner(tiny(kind), max_len=40), tiny(kind))
    row.extend([SWITCH - 3])
    row.extend([6])  # on both sides of the switch
    row.extend([1])
    row.rewind([SWITCH - 1])
    row.extend([1])
    row.extend([1])
    row.rewind([SWITCH])
    row.extend([3])
    row.rewind([SWITCH + 2])
    row.extend([4])


@pytest.mark.parametrize("kind", TWO_ROPES)
def test_a_short_row_beside_a_long_one(kind: str) -> None:
    rows = Prefixes(make_runner(tiny(kind), batch=3, max_len=40), tiny(kind), 1)
    rows.extend([SWITCH + 4, 5, 0])
    rows.extend([1, 1, 1])
    rows.extend([2, SWITCH, 3])
    rows.copy(0, [2])
    rows.rewind([SWITCH - 2, 7, SWITCH + 1])
    rows.extend([4, 1, 1])
    rows.extend([2, 3], [2, 0])


def test_a_prompt_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.models.runners.forward.CHUNK", 7)
    row = Prefixes(make_runner(tiny("phi3"), max_len=60), tiny("phi3"))
    row.extend([SWITCH + 23], logits=False)
    row.extend([1])


def test_an_interrupted_pass_leaves_the_rows_as_they_were() -> None:
    row = Prefixes(make_runner(tiny("phi3"), max_len=40), tiny("phi3"))
    row.extend([SWITCH - 2])
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    handle = tiny("phi3").get_output_embeddings().register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        row.runner.extend(torch.ones(1, 5, dtype=torch.long))
    handle.remove()
    assert row.runner.lengths == [SWITCH - 2]
    row.extend([5])


# --- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "opt"])
def test_most_models_have_no_switch(kind: str) -> None:
    assert find_switch(tiny(kind)) is None


def test_the_switch_is_found_by_asking_the_embedding() -> None:
    for kind in TWO_ROPES:
        assert find_switch(tiny(kind)) == Switch(SWITCH, once=True)
    assert find_switch(tiny("llama-dynamic")) == Switch(CONTEXT, once=False)


def test_asking_leaves_an_embedding_that_remembers_as_it_was() -> None:
    model = fresh("llama-dynamic")
    rope = model.get_decoder().rotary_emb
    before = rope.inv_freq.clone()
    find_switch(model)
    assert torch.equal(rope.inv_freq, before)
    assert rope.max_seq_len_cached == CONTEXT


def test_the_reason_names_the_switch_and_what_is_done() -> None:
    kind, reason = runner_kind(tiny("phi3"))
    assert kind == "row"
    assert f"beyond {SWITCH} tokens its rotary embedding is another: longer texts are read again" in reason
    assert (
        "longer texts are not served, for it changes again with every token"
        in runner_kind(tiny("llama-dynamic"))[1]
    )


def test_short_rows_need_no_second_cache() -> None:
    assert isinstance(make_runner(tiny("phi3"), max_len=SWITCH), RowRunner)
    assert isinstance(make_runner(tiny("phi3"), max_len=SWITCH + 1), SwitchRunner)


def test_an_embedding_that_changes_with_every_token_is_served_up_to_its_switch() -> None:
    row = Prefixes(make_runner(tiny("llama-dynamic"), max_len=CONTEXT), tiny("llama-dynamic"))
    row.extend([CONTEXT - 1])
    row.extend([1])
    with pytest.raises(
        UserError, match=rf"texts of {CONTEXT} tokens, not {CONTEXT + 1}: .*every token: use max_len="
    ):
        make_runner(tiny("llama-dynamic"), max_len=CONTEXT + 1)


def test_the_crop_runner_stops_at_the_switch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UserError, match="the crop runner keeps one cache"):
        make_runner(tiny("phi3"), max_len=SWITCH + 1, prefer="crop")
    monkeypatch.setattr(choose, "_OWN_MASKS", {"phi3": "it builds its own mask"})
    model = fresh("phi3")
    with caplog.at_level(logging.WARNING):
        loaded = load_models(model, tokenizer=word_tokenizer())
    assert loaded.context == SWITCH
    assert f"served up to {SWITCH} of its {CONTEXT} tokens of context" in caplog.text
    assert "chosen because it builds its own mask" in caplog.text
    row = Prefixes(make_runner(model, max_len=SWITCH), model)
    row.extend([SWITCH])


def test_the_trial_crosses_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("phi3")
    assert choose._why_wrong(lambda: FarRunner(model, 2, 16, {"": None}, SWITCH), model, SWITCH) is None
    wrong = choose._why_wrong(lambda: RowRunner(model, 2, 16, {"": None}), model, SWITCH)
    assert wrong is not None
    assert wrong.startswith("differs from the uncached pass")
    monkeypatch.setattr(choose, "FarRunner", lambda *args: RowRunner(*args[:4]))
    assert "longer texts are not served, for tried on a few tokens" in runner_kind(model)[1]


def test_queries_that_grow_with_their_position() -> None:
    row = Prefixes(make_runner(tiny("llama4"), max_len=30), tiny("llama4"))
    row.extend([9])
    row.rewind([5])
    row.extend([6])
    row.extend([1])
