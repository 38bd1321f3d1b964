"""What caches need is what they take, and what is free is what they may take."""

import pytest
import torch
from tests.models.tiny import tiny
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedModel

from sprinter.errors import RowsError
from sprinter.models import memory
from sprinter.models.choose import make_runner


def deepseek() -> PreTrainedModel:
    """Latent attention: one narrow head of keys and values is cached, whatever the number of heads."""
    config = DeepseekV3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=2, n_group=1, topk_group=1,
        num_experts_per_tok=1, first_k_dense_replace=2, kv_lora_rank=12, q_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8,
        max_position_embeddings=96, pad_token_id=None, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval()


def tensors(runner: object) -> int:
    """Bytes of all keys and values of a runner."""
    layers = runner._cache.layers  # type: ignore[attr-defined]
    return sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "gemma2", "gemma3", "qwen2-sliding", "opt", "deepseek"])
def test_a_cache_takes_what_was_said(kind: str) -> None:
    model = deepseek() if kind == "deepseek" else tiny(kind)
    runner = make_runner(model, batch=2, max_len=30)
    runner.extend(torch.ones(2, 30, dtype=torch.long))
    assert 2 * memory.cache_bytes(model, 30) == tensors(runner)


def test_a_crop_runners_cache_takes_what_was_said() -> None:
    runner = make_runner(tiny("gpt_neo"), max_len=30)
    runner.extend(torch.ones(1, 30, dtype=torch.long))
    spare = memory.token_bytes(tiny("gpt_neo"))
    assert memory.cache_bytes(tiny("gpt_neo"), 30) == tensors(runner) + spare


def test_latent_attention_caches_little() -> None:
    assert memory.token_bytes(deepseek()) == 2 * (12 + 8) * 4


def test_memory_that_the_allocator_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert memory.free_bytes(torch.device("cuda")) == 1400


def test_rows_of_unlike_length_in_two_models() -> None:
    models = [tiny("llama"), tiny("gpt2")]
    budget = 3 * (memory.cache_bytes(models[0], 90) + memory.cache_bytes(models[1], 20))
    memory.check_memory(models, 3, [90, 20], budget)
    for lengths, fits in (([90, 20], 3), ([90, 90], 1)):
        with pytest.raises(RowsError, match=f"use a batch of {fits} or less"):
            memory.check_memory(models, fits + 1, lengths, budget)
