"""Forward FLOPs of one token, counted as in Hoffmann et al. (2022, "Training Compute-Optimal Large Language Models").

Appendix F: multiplications and additions count as one each, embeddings as a product with the vocabulary; norms and
biases do not count. Grouped-query attention, gated MLPs and experts, which the appendix does not cover, are counted by
their matrix products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

__all__ = ["ForwardCosts", "forward_flops", "full_context"]

_UNGATED = frozenset(
    {
        "biogpt", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese",
        "gptj", "mpt", "nemotron", "openai-gpt", "opt", "persimmon", "phi", "starcoder2", "xglm",
    }
)  # fmt: skip
"""Model types whose MLP has two matrices; all others have three (gate, up, down)."""


class ForwardCosts(NamedTuple):
    """Forward FLOPs of one token through each model (Hoffmann et al. 2022, Appendix F)."""

    target: float = 0.0
    draft: float = 0.0


def forward_flops(config: PreTrainedConfig, context: int | None = None) -> float:
    """FLOPs of one token's forward pass.

    Args:
        config: config of a decoder-only transformers model.
        context: number of tokens that it attends to; None: the model's full context. Sliding and local layers are
            counted as if they attended to all of it.
    """
    text: Any = config.get_text_config(decoder=True)
    attended = full_context(config) if context is None else context
    d, vocab, layers = int(text.hidden_size), int(text.vocab_size), int(text.num_hidden_layers)
    return float(2 * vocab * d + layers * (_attention(text, d, attended) + _mlp(text, d)) + 2 * d * vocab)


def full_context(config: PreTrainedConfig) -> int:
    """Number of tokens that a model can attend to; 2,048 if its config names none."""
    text: Any = config.get_text_config(decoder=True)
    return int(_first(text, "max_position_embeddings", "max_seq_len") or 2048)


def _attention(text: Any, d: int, context: int) -> int:
    """Multiplications in one layer's attention for one token that sees ``context`` tokens."""
    heads = int(text.num_attention_heads)
    k = int(_first(text, "head_dim") or d // heads)
    kv_heads = _kv_heads(text, heads)
    qkv = 2 * d * k * (heads + 2 * kv_heads)
    logits = reduction = 2 * context * k * heads
    softmax = 3 * heads * context
    output = 2 * k * heads * d
    return qkv + logits + softmax + reduction + output


def _kv_heads(text: Any, heads: int) -> int:
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return int(_first(text, "num_key_value_heads", "num_kv_heads") or heads)


def _mlp(text: Any, d: int) -> int:
    """Multiplications in one layer's MLP; with experts, in those that one token is routed to."""
    ffw = int(_first(text, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * d)
    visited = _first(text, "num_experts_per_tok")
    if visited:
        ffw = int(visited) * int(_first(text, "moe_intermediate_size") or ffw)
    matrices = 2 if text.model_type in _UNGATED else 3
    return 2 * matrices * d * ffw


def _first(text: Any, *names: str) -> Any:
    """The first of these config entries that is set; None if none is."""
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)
