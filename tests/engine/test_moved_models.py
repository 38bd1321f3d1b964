"""A model whose dtype or vocabulary changes: after a reload texts are right, or one line says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.tiny import VOCAB, fresh, word_tokenizer

import sprinter
from sprinter.errors import UserError

PROMPT = [3, 9, 11, 4]
GREEDY: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 8, "temperature": 0}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def pair_of(kind: str = "llama", **options: Any) -> sprinter.Pair:
    given: dict[str, Any] = {"tokenizer": word_tokenizer(), "compile": False, **options}
    return sprinter.load_pair(fresh(kind), fresh(kind), **given)


def ids(pair: sprinter.Pair, prompt: list[int] = PROMPT) -> list[int]:
    return [token.id for token in pair.generate(prompt, **GREEDY).tokens]


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "gpt_neo"])
def test_another_dtype_after_a_text(kind: str, name: str, which: str) -> None:
    pair, other = pair_of(kind), pair_of(kind)
    before = ids(pair)
    for one in (pair, other):
        getattr(one.models, which).model.to(DTYPES[name])
        one.reload()
    assert ids(pair) == ids(other) and ids(pair, [5, 2]) == ids(other, [5, 2])
    getattr(pair.models, which).model.float()
    pair.reload()
    if name == "float64":
        assert ids(pair) == before


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_vocabulary_of_another_size_after_a_text(which: str) -> None:
    pair = pair_of()
    before, model = ids(pair), getattr(pair.models, which).model
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    pair.reload()
    assert ids(pair) == before
    model.resize_token_embeddings(VOCAB - 3)
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"has {VOCAB - 3} token ids now and had {VOCAB} .*: load the pair again"
        ):
            pair.reload()


def test_an_engine_whose_caches_hold_texts_says_what_to_do() -> None:
    pair = pair_of()
    with pair.stream(PROMPT, **{**GREEDY, "method": "autoregressive", "min_new_tokens": 8}) as stream:
        next(iter(stream))
        pair.models.target.model.to(torch.bfloat16)
        with pytest.raises(
            UserError, match=r"was moved from float32 on cpu to bfloat16 on cpu while .* pair.reload"
        ):
            stream.finish()
    pair.reload()
    other = pair_of()
    other.models.target.model.to(torch.bfloat16)
    assert ids(pair) == ids(other)


def test_a_reload_forgets_what_was_known() -> None:
    pair = pair_of()
    ids(pair)
    assert pair._runtime.targets._free and pair._runtime.described
    with sprinter.Engine(pair, rows=1, max_len=20):
        pair.reload()
    assert not pair._runtime.targets._free and "described" not in vars(pair._runtime)  # nor the engine's rows
    assert len(ids(pair)) > 0
