"""Models that the engine's tests share."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sprinter
from sprinter.engine.backends.base import PassInput, PassOutput
from sprinter.engine.executor import Executor
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.models.pair import LoadedModel, LoadedPair

VOCAB = 24


def tiny_llama(seed: int, layers: int = 1, scale: float = 12.0) -> LoadedModel:
    """A random Llama whose laws are far from flat, in float32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=96, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(scale)
    return LoadedModel(model, f"tiny-{seed}", None, 96, VOCAB, 16, ())


def double(model: LoadedModel) -> LoadedModel:
    """The same in float64."""
    return dataclasses.replace(model, model=copy.deepcopy(model.model).double())  # type: ignore[union-attr]


def double_pair() -> sprinter.Pair:
    """Two random Llamas in float64 with a head of every kind."""
    models = LoadedPair(double(tiny_llama(1, layers=2)), double(tiny_llama(2)), None)
    chance = torch.Generator().manual_seed(3)
    network = Linear.of(torch.randn(1, 16, generator=chance), torch.zeros(1))
    gate = Head(HeadConfig(16, "tiny-2", "tiny-1"), network)
    heads = []
    for kind, features in (
        ("specdec++", ("hidden", "hidden_x")),
        ("disco", ("entropy", "top_q(k=3)", "position")),
        ("judge", ("hidden",)),
        ("diversed", ("hidden",)),
    ):
        config = HeadConfig(16, "tiny-2", "tiny-1", kind=kind, features=features)
        with torch.random.fork_rng():
            torch.manual_seed(4)
            network = config.network()
            for weights in network.parameters():
                torch.nn.init.normal_(weights, std=0.7)
        heads.append(Head(config, network))
    return sprinter.Pair(models, gate, heads)


def fail_pass(monkeypatch: pytest.MonkeyPatch, number: int, error: Exception) -> None:
    """Let a forward pass of an engine, counted from 1, raise an error; the others run."""
    real, calls = Executor.run, itertools.count(1)

    def run(models: Executor, inputs: Sequence[PassInput]) -> Sequence[PassOutput]:
        if next(calls) == number:
            raise error
        return real(models, inputs)

    monkeypatch.setattr(Executor, "run", run)


@pytest.fixture(scope="session")
def tiny_pair() -> sprinter.Pair:
    """Two random Llamas without a tokenizer, and a gate; no EOS."""
    models = LoadedPair(tiny_llama(1, layers=2), tiny_llama(2), None)  # type: ignore[arg-type]
    chance = torch.Generator().manual_seed(3)
    network = Linear.of(torch.randn(1, 16, generator=chance), torch.zeros(1))
    gate = Head(HeadConfig(16, "tiny-2", "tiny-1"), network)
    return sprinter.Pair(models, gate)


@pytest.fixture(scope="session")
def builtin_pair() -> sprinter.Pair:
    """The pair in the wheel."""
    return sprinter.load_pair()
