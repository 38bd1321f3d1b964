"""Rotary embeddings that depend on a text's length: the context ends where they change."""

import logging

import pytest
import torch
from tests.models.tiny import CONTEXT, SWITCH, fresh, tiny, word_tokenizer
from tests.models.told import Told

from sprinter.errors import UserError
from sprinter.models import choose
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.pair import load_models
from sprinter.models.runners.rope import find_switch

TWO_ROPES = ["phi3", "phi3-sliding", "phimoe", "llama-longrope"]


@pytest.mark.parametrize("kind", TWO_ROPES)
def test_rows_up_to_the_switch(kind: str) -> None:
    rows = Told(make_runner(tiny(kind), batch=2, max_len=SWITCH), kind, 1, tolerance=1e-4)
    rows.extend([SWITCH - 3, 5])
    rows.extend([2, 4])
    rows.rewind([SWITCH - 2, 7])
    rows.extend([2, 1])


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "opt"])
def test_most_models_have_no_switch(kind: str) -> None:
    assert find_switch(tiny(kind)) is None


def test_the_switch_is_found_by_asking_the_embedding() -> None:
    for kind in TWO_ROPES:
        assert find_switch(tiny(kind)) == SWITCH
    assert find_switch(tiny("llama-dynamic")) == CONTEXT


def test_asking_leaves_an_embedding_that_remembers_as_it_was() -> None:
    model = fresh("llama-dynamic")
    rope = model.get_decoder().rotary_emb
    before = rope.inv_freq.clone()
    find_switch(model)
    assert torch.equal(rope.inv_freq, before)
    assert rope.max_seq_len_cached == CONTEXT


@pytest.mark.parametrize(("kind", "switch"), [("phi3", SWITCH), ("llama-dynamic", CONTEXT)])
def test_no_runner_goes_beyond_the_switch(kind: str, switch: int) -> None:
    assert (
        f"its context ends at {switch} tokens, where its rotary embedding changes"
        in runner_kind(tiny(kind))[1]
    )
    make_runner(tiny(kind), max_len=switch)
    with pytest.raises(
        UserError, match=rf"up to {switch} tokens, not {switch + 1}: .*: use max_len={switch} or less"
    ):
        make_runner(tiny(kind), max_len=switch + 1)


def test_slots_of_a_tree_are_beside_the_text() -> None:
    make_runner(tiny("phi3"), max_len=SWITCH + 3, leaves=4)
    with pytest.raises(UserError, match=f"not {SWITCH + 1}"):
        make_runner(tiny("phi3"), max_len=SWITCH + 3, leaves=3)


@pytest.mark.parametrize("masks", [{}, {"phi3": "it builds its own mask"}])
def test_the_context_of_a_loaded_model_ends_at_the_switch(
    masks: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "_OWN_MASKS", masks)
    with caplog.at_level(logging.WARNING):
        loaded = load_models(fresh("phi3"), tokenizer=word_tokenizer())
    assert loaded.context == SWITCH
    assert f"served up to {SWITCH} of its {CONTEXT} tokens of context" in caplog.text
    assert "where its rotary embedding changes" in caplog.text


def test_queries_that_grow_with_their_position() -> None:
    row = Told(make_runner(tiny("llama4"), max_len=30), "llama4", tolerance=1e-4)
    row.extend([9])
    row.rewind([5])
    row.extend([6])
    row.extend([1])
