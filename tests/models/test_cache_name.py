"""One place knows what transformers calls a cache; with the names of before and after 5.24 nothing else changes."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from tests.models.tiny import tiny
from torch import nn
from transformers import DynamicCache
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import sprinter
from sprinter.errors import UserError
from sprinter.models.cache_name import cache_name, model_cache_name

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels.families import FAMILIES


class Before(nn.Module):
    def forward(self, x: Any, past_key_values: Any = None) -> None: ...


class After(nn.Module):
    def forward(self, x: Any, cache: Any = None) -> None: ...


class Around(nn.Module):
    def forward(self, *given: Any, **named: Any) -> None: ...


def test_modules_are_asked_for_the_name() -> None:
    assert cache_name(Before) == "past_key_values" and cache_name(After) == "cache"
    assert model_cache_name(Before.forward) == "past_key_values"
    assert model_cache_name(Around.forward) == model_cache_name(type(tiny("llama")).forward)
    with pytest.raises(UserError, match=r"^transformers [\d.]+ calls the cache of Around by a name"):
        cache_name(Around)


@pytest.mark.parametrize("layer", FAMILIES)
def test_layers_of_all_families_have_a_known_name(layer: type[nn.Module]) -> None:
    assert cache_name(layer) in inspect.signature(layer.forward).parameters


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_layers_find_their_cache_under_either_name(name: str) -> None:
    layer: Any = tiny("gpt2").transformer.h[0]
    family = FAMILIES[GPT2Block]
    assert family.arguments(layer, (), {name: "own", "attention_mask": 1})["cache"] == "own"
    assert family.arguments(layer, ("own", 1), {})["cache"] == "own"
    assert family.arguments(layer, (), {})["cache"] is None


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_pair_writes_without_a_word_of_transformers(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = sprinter.load_pair(dtype=dtype)
        texts = {
            pair.generate("The river", method=method, max_new_tokens=12, temperature=0).text
            for method in ("autoregressive", "speculative(gamma=3)")
        }
    assert len(texts) == 1
    assert not [line for line in caplog.records if line.name.startswith("transformers")]


def test_a_cache_that_a_model_is_given_is_filled() -> None:
    model, cache = tiny("llama"), DynamicCache()
    model(
        torch.ones(1, 3, dtype=torch.long), use_cache=True, **{model_cache_name(type(model).forward): cache}
    )
    assert cache.get_seq_length() == 3
