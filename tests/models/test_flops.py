"""FLOPs against the figures of the SPRINTER paper's models (20 tokens) and against sums by hand."""

import pytest
from transformers import GemmaConfig, GPT2Config, GPTNeoConfig, LlamaConfig, MixtralConfig, PreTrainedConfig

from sprinter.models.flops import forward_flops


def neo(d: int, layers: int, heads: int) -> PreTrainedConfig:
    types = [[["global", "local"], layers // 2]]
    return GPTNeoConfig(hidden_size=d, num_layers=layers, num_heads=heads, attention_types=types)


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (GPT2Config(), 7.25),
        (GPT2Config(n_embd=1600, n_layer=48, n_head=25), 71.78),
        (neo(768, 12, 12), 8.01),
        (neo(2048, 24, 16), 64.65),
    ],
)
def test_twenty_tokens_of_published_models(config: PreTrainedConfig, billions: float) -> None:
    assert 20 * forward_flops(config) / 1e9 == pytest.approx(billions, abs=0.005)


LLAMA = LlamaConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=24, max_position_embeddings=50,
)  # fmt: skip


@pytest.mark.parametrize(("context", "attended"), [(None, 50), (7, 7)])
def test_grouped_keys_and_gated_mlp_by_hand(context: int | None, attended: int) -> None:
    queries, keys_and_values = 2 * 16 * 32, 2 * 2 * 16 * 16
    logits = reduction = 2 * attended * 32
    layer = queries + keys_and_values + logits + 3 * 4 * attended + reduction + 2 * 32 * 16 + 3 * 2 * 16 * 24
    assert forward_flops(LLAMA, context) == 2 * 2 * 100 * 16 + 3 * layer


def test_one_key_head_for_all_queries() -> None:
    shape = {"hidden_size": 16, "num_attention_heads": 4, "head_dim": 4, "num_hidden_layers": 1}
    one, four = (forward_flops(GemmaConfig(**shape, num_key_value_heads=n), 10) for n in (1, 4))
    assert four - one == 2 * 2 * 16 * 4 * 3


def test_experts_count_where_a_token_visits_them() -> None:
    shape = {
        "vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 8,
    }  # fmt: skip
    two, three = (forward_flops(MixtralConfig(**shape, num_experts_per_tok=n), 10) for n in (2, 3))
    assert three - two == 3 * 2 * 16 * 24


def test_a_longer_context_costs_more() -> None:
    assert forward_flops(LLAMA, 10) < forward_flops(LLAMA, 20)
