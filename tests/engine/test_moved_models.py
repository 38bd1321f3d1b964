"""A model whose dtype, device or vocabulary changes after a text: the next is right, or one line says what to do."""

from __future__ import annotations

from collections.abc import Callable
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
    """It was a RuntimeError of attention: idle runners were used again, with their caches and masks."""
    pair, other = pair_of(kind), pair_of(kind)
    before = ids(pair)
    for one in (pair, other):
        getattr(one.models, which).model.to(DTYPES[name])
    assert ids(pair) == ids(other) and ids(pair, [5, 2]) == ids(other, [5, 2])
    getattr(pair.models, which).model.float()
    if name == "float64":
        assert ids(pair) == before


@pytest.mark.parametrize("which", ["target", "draft"])
def test_a_vocabulary_of_another_size_after_a_text(which: str) -> None:
    pair = pair_of()
    before, model = ids(pair), getattr(pair.models, which).model
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    assert ids(pair) == before
    model.resize_token_embeddings(VOCAB - 3)
    for _ in range(2):
        with pytest.raises(
            UserError, match=rf"has {VOCAB - 3} token ids now and had {VOCAB} .*: load the pair again"
        ):
            ids(pair)


CHANGES: dict[str, Callable[[Any], object]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "meta": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_with_our_layers_says_what_they_do_not_read(change: str) -> None:
    pair = sprinter.load_pair(dtype="int8")
    pair.generate("def f(", **GREEDY)
    CHANGES[change](pair.models.target.model)
    for prompt in ("def f(", "class A:"):
        with pytest.raises(
            UserError, match=r"its weights are in \w+ on \w+, which our kernels do not read; load it anew"
        ):
            pair.generate(prompt, **GREEDY)


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
    assert pair._parts.targets._free and pair._parts.described
    pair.reload()
    assert not pair._parts.targets._free and "described" not in vars(pair._parts)
    assert len(ids(pair)) > 0
