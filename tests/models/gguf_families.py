"""Made models of every architecture that PyTorch runs from GGUF files, written as llama.cpp's converter stores them."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tests.models.gguf_files import EXTRA, byte_tokenizer
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sprinter.models.gguf.load import EOS_KEY
from sprinter.models.gguf.vocabulary import add_vocabulary

WINDOW = 7
_SIZES = {
    "vocab_size": len(byte_tokenizer()) + EXTRA,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 5e3}
_YARN = {"rope_type": "yarn", "rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_GPT2 = {
    "vocab_size": _SIZES["vocab_size"], "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GEMMA = {**_SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}
_GLM = {
    **_SIZES, "head_dim": 32, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "use_qk_norm": True,
    "attention_bias": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5, "num_mtp_layers": 1,
}  # fmt: skip
_LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}


def _gemma3(full: dict[str, Any], period: int) -> PreTrainedModel:
    types = ["full_attention" if not i % period else "sliding_attention" for i in (1, 2, 3)]
    rope = {"full_attention": full, "sliding_attention": _LOCAL}
    return Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, layer_types=types, rope_parameters=rope))


FAMILIES: dict[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "llama": ("llama", lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, rope_parameters=_ROPE))),
    "llama-tied": (
        "llama",
        lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, head_dim=32, tie_word_embeddings=True)),
    ),
    "llama-biases": (
        "llama",
        lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, attention_bias=True, rope_parameters=_LLAMA3)),
    ),
    "qwen2": ("qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, rope_parameters=_ROPE))),
    "qwen2-yarn": ("qwen2", lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, rope_parameters=_YARN))),
    "qwen3": ("qwen3", lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=32, rope_parameters=_ROPE))),
    "gemma2": ("gemma2", lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA))),
    "gemma3": ("gemma3", lambda: _gemma3(_ROPE, 2)),
    "glm4moe": ("glm4moe", lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**_GLM))),
    "gemma3-linear": ("gemma3", lambda: _gemma3(_ROPE | {"rope_type": "linear", "factor": 8.0}, 2)),
}
"""Name → architecture in GGUF, and what makes the model."""
OURS = [name for name in FAMILIES if name != "glm4moe"]
"""Those that our kernels run."""

UNWRITTEN: dict[str, Callable[[], PreTrainedModel]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, head_dim=32, sliding_window=WINDOW)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "gpt2-by-layer": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2, scale_attn_by_inverse_layer_idx=True)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES, rotary_pct=0.25)),
    "neox-in-turn": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**_SIZES, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new")
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, sliding_window=None)),
    "phi3-partial": lambda: Phi3ForCausalLM(Phi3Config(**_SIZES, partial_rotary_factor=0.75)),
}
"""Name → what makes a model that is not written as a GGUF file here."""


def made(name: str) -> PreTrainedModel:
    """A random model, norms and biases too."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = (UNWRITTEN[name] if name in UNWRITTEN else FAMILIES[name][1])().eval()
        for values in _weights(model).values():
            if values.dim() == 1:
                values.data = values.data + 0.3 * torch.randn_like(values)
    return model


def written(name: str, path: Path, kind: str = "F32", **changes: Any) -> PreTrainedModel:
    """Write the model as a GGUF file; returns it.

    Args:
        name: a key of ``FAMILIES``.
        path: the new file.
        kind: GGML type of its matrices.
        changes: metadata of its architecture to add, or to leave out (None); "__" stands for a dot.
    """
    model = made(name)
    weights, count = _weights(model), model.config.num_hidden_layers
    if getattr(model.config, "num_mtp_layers", 0):
        last, new, size = f"model.layers.{count - 1}.", f"model.layers.{count}.", model.config.hidden_size
        weights |= {name.replace(last, new): one for name, one in weights.items() if name.startswith(last)}
        weights |= {f"{new}{one}.weight": torch.ones(size) for one in ("enorm", "hnorm", "shared_head.norm")}
        weights[f"{new}eh_proj.weight"] = torch.ones(size, 2 * size)
        weights[f"{new}shared_head.head.weight"] = weights["lm_head.weight"]
    store(path, FAMILIES[name][0], model.config, weights, kind, **changes)
    return model


def store(
    path: Path,
    architecture: str,
    config: Any,
    weights: Mapping[str, Tensor],
    kind: str = "F32",
    **changes: Any,
) -> None:
    """Write weights under the names that checkpoints have as a GGUF file; arguments as in ``written``."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    metadata = _metadata(config) | changes
    for key, value in metadata.items():
        _add(writer, f"{architecture}.{key}", value)
    if kind in ("F32", "F16", "Q8_0"):
        writer.add_file_type({"F32": 0, "F16": 1, "Q8_0": 7}[kind])
    if config.vocab_size == _SIZES["vocab_size"]:
        add_vocabulary(writer, byte_tokenizer(), path.stem, config.vocab_size)
    writer.add_string(EOS_KEY, "0")
    arch = next(arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers + 1)
    for key, tensor in _by_expert(weights).items():
        stored = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if architecture == "llama" and (".q_proj." in key or ".k_proj." in key):
            tensor = _in_pairs(tensor, config.head_dim)
        if architecture.startswith("gemma") and key.endswith("norm.weight"):
            tensor = tensor + 1
        numbers, type_ = tensor.detach().contiguous().numpy(), gguf.GGMLQuantizationType[kind]
        if numbers.ndim > 1 and kind != "F32":
            writer.add_tensor(stored, gguf.quants.quantize(numbers, type_), raw_dtype=type_)
        else:
            writer.add_tensor(stored, numbers)
    if (rope := config.rope_parameters).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(rope, config.head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, and the biases of routers, which are none."""
    buffers = {name: one for name, one in model.named_buffers() if name.endswith("e_score_correction_bias")}
    return {**dict(model.named_parameters()), **buffers}


def _by_expert(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of experts stacked, gate and up apart; transformers' models have both in one, checkpoints each expert."""
    found: dict[str, Tensor] = {}
    for name, values in weights.items():
        if name.endswith("experts.gate_up_proj"):
            both = zip(("gate", "up"), values.chunk(2, 1), strict=True)
            found |= {f"{name.replace('gate_up', part)}.weight": half for part, half in both}
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = values
        elif match := re.fullmatch(r"(.*experts\.)0\.(\w+\.weight)", name):
            count = sum(re.fullmatch(rf"{match[1]}\d+\.{match[2]}", other) is not None for other in weights)
            found[match[1] + match[2]] = torch.stack(
                [weights[f"{match[1]}{i}.{match[2]}"] for i in range(count)]
            )
        elif not re.search(r"experts\.\d+\.", name):
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = values
    return found


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _metadata(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    found: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
    }
    if (size := getattr(config, "head_dim", None)) is not None:
        found |= {"attention.key_length": size, "attention.value_length": size}
    if config.model_type == "llama":
        found["rope.dimension_count"] = config.head_dim
    if config.model_type.startswith("gemma"):
        found["attention.sliding_window"] = config.sliding_window
    if config.model_type == "gemma2":
        found |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if config.model_type == "gemma3_text":
        found["attention.sliding_window_pattern"] = 2
    if config.model_type == "glm4_moe":
        found |= {
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
            "expert_count": config.n_routed_experts, "expert_used_count": config.num_experts_per_tok,
            "expert_shared_count": config.n_shared_experts, "expert_weights_norm": config.norm_topk_prob,
            "expert_feed_forward_length": config.moe_intermediate_size, "expert_gating_func": 2,
            "leading_dense_block_count": config.first_k_dense_replace, "expert_group_count": 1,
            "expert_group_used_count": 1, "expert_weights_scale": config.routed_scaling_factor,
            "nextn_predict_layers": config.num_mtp_layers,
        }  # fmt: skip
        found["block_count"] += config.num_mtp_layers
    if rope["rope_type"] in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found


def _in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Row i of a head's first half, then row i of its second half."""
    order = torch.arange(len(rows)).view(-1, 2, head_dim // 2).transpose(1, 2).reshape(-1)
    return rows[order]


def _divisors(rope: dict[str, Any], head_dim: int) -> Any:
    """Frequencies without scaling over those that transformers scales."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = LlamaConfig(
        hidden_size=64, num_attention_heads=64 // head_dim, head_dim=head_dim, rope_parameters=rope
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](sizes, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    return (plain / scaled).numpy()
