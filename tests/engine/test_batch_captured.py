"""Many rows with captured steps: the texts are those of eager steps alone."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.eager_units import EagerUnits
from tests.models.tiny import CONTEXT, VOCAB, tiny
from transformers import PreTrainedModel

import sprinter
from sprinter.engine import pool
from sprinter.engine.policy import Policy
from sprinter.heads.head import Head, HeadConfig
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.pair import LoadedModel, LoadedPair

METHODS = ("speculative(gamma=3)", "sprinter(tau=0.5)", "autoregressive", "disco", "svip(h=0.4)", "draft-only",
           "lookup(n=2, gamma=4)", "batch(drafts=2, gamma=2)")  # fmt: skip
TEXTS = 16


def loaded(kind: str) -> LoadedModel:
    return LoadedModel(tiny(kind), kind, None, CONTEXT, VOCAB, 32, ())


def head(kind: str, *features: str) -> Head:
    config = HeadConfig(32, "qwen2", "llama", kind=kind, features=features)
    return Head(config, config.network())


@pytest.mark.parametrize("ahead", [1, 4])
def test_captured_rows_write_what_eager_ones_write_alone(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    heads = [head("gate", "hidden"), head("disco", "entropy", "position")]
    pair = sprinter.Pair(LoadedPair(loaded("llama"), loaded("qwen2"), None), None, heads)
    asked: dict[str, Any] = {
        "method": [METHODS[i % len(METHODS)] for i in range(TEXTS)],
        "temperature": [(1.0, 0.7, 0.0)[i % 3] for i in range(TEXTS)],
        "top_k": [(0, 5)[i % 2] for i in range(TEXTS)],
        "max_new_tokens": [4 + i for i in range(TEXTS)],
        "seed": list(range(TEXTS)),
        "ahead": [ahead] * TEXTS,
    }
    prompts = [[(5 * i + j) % VOCAB for j in range(1 + i)] for i in range(TEXTS)]
    alone = [
        pair.generate(prompt, **{name: values[i] for name, values in asked.items()})
        for i, prompt in enumerate(prompts)
    ]
    units = {id(tiny(kind)): EagerUnits(kind) for kind in ("llama", "qwen2")}

    def make(model: PreTrainedModel, *, batch: int, max_len: int, **options: Any) -> CapturedRunner:
        own = units[id(model)]
        return CapturedRunner(model, batch, max_len, own.windows, own)

    monkeypatch.setattr(pool, "make_runner", make)
    together = pair.generate_batch(prompts, rows=5, policy=Policy(share=0.7), **asked)
    for one, other in zip(alone, together, strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert one.stats.target_calls == other.stats.target_calls
    assert units[id(tiny("llama"))].calls["target"] > 10
    assert units[id(tiny("qwen2"))].calls["draft"] > 10
