"""The transformers config of a GGUF file, for the architectures whose weights PyTorch can run.

transformers can read GGUF files too. It ignores how a file scales its positions and other keys that it does not know,
so that a model may load and be a little wrong. Here a file is refused if its metadata holds anything that the config
would not express.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from sprinter.errors import UserError, first_line
from sprinter.models.gguf.header import GgufHead

__all__ = ["FAMILIES", "Family", "family_of", "llama3_factors", "model_config", "not_here"]

_SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SIGMOID = 2  # of ``expert_gating_func``
_SPECIAL = {"bos": "bos_token_id", "padding": "pad_token_id"}

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""How all published models of Llama 3.1 to 3.3 scale their positions; only the factor differs."""


class _Keys:
    """The metadata of a file's architecture. ``left`` names the keys that nobody has asked for."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._at = f"{architecture}."
        self._values = {
            key.removeprefix(self._at): value for key, value in metadata.items() if key.startswith(self._at)
        }
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise ValueError(f"its metadata lacks {self._at}{key}")
        return value

    def left(self) -> list[str]:
        """Names of keys with a value (0, false and "none" switch something off) that have not been read."""
        unread = self._values.keys() - self._asked
        return sorted(self._at + key for key in unread if self._values[key] not in (0, "", "none"))


def _llama(keys: _Keys, config: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors


def _gemma(keys: _Keys, config: dict[str, Any]) -> None:
    """What Gemma 2 and 3 share. llama.cpp tells the 27 B models, whose attention scale differs, by their layers."""
    config["sliding_window"] = keys.need("attention.sliding_window")
    wide = config["num_hidden_layers"] in (46, 62)
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )


def _gemma2(keys: _Keys, config: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    _gemma(keys, config)
    config["attn_logit_softcapping"] = keys.get("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.get("final_logit_softcapping", 30.0)


def _gemma3(keys: _Keys, config: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    _gemma(keys, config)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[name] = keys.get(name)
    period = keys.get("attention.sliding_window_pattern", 6)
    if not isinstance(period, int):
        raise ValueError("its layers slide in a pattern of their own")
    config["sliding_window_pattern"] = period
    local = {"rope_type": "default", "rope_theta": keys.get("rope.freq_base_swa", 10_000.0)}
    config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _glm4_moe(keys: _Keys, config: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """GLM-4.5. The blocks of a file include its modules of multi-token prediction (``nextn``)."""
    config["num_mtp_layers"] = keys.get("nextn_predict_layers", 0)
    config["num_hidden_layers"] -= config["num_mtp_layers"]
    config |= {known: keys.need(key) for key, known in _EXPERTS.items()}
    config["first_k_dense_replace"] = keys.get("leading_dense_block_count", 0)
    config["routed_scaling_factor"] = keys.get("expert_weights_scale", 0.0) or 1.0
    config["norm_topk_prob"] = bool(keys.get("expert_weights_norm", False))
    if keys.get("expert_gating_func", _SIGMOID) not in (0, _SIGMOID):
        raise ValueError("its experts are not weighted by a sigmoid")
    if any(keys.get(key, 1) > 1 for key in ("expert_group_count", "expert_group_used_count")):
        raise ValueError("its experts are in groups")
    config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    config["rope_parameters"]["partial_rotary_factor"] = (
        keys.get("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    )


@dataclass(frozen=True, slots=True)
class Family:
    """How llama.cpp's converter stores the models of one architecture.

    Attributes:
        architecture: its name in GGUF.
        model_type: its type in transformers.
        paired: whether rows of Q and K are in pairs, see ``models.gguf.write``.
        norm_offset: added to the weights of norms in the file.
        rope_base: base of the rotary embedding if the file names none.
        partial: whether it may rotate a part of each key; ``more`` says which.
        more: adds the settings of the architecture to a config.
    """

    architecture: str
    model_type: str
    paired: bool = False
    norm_offset: float = 0.0
    rope_base: float = 10_000.0
    partial: bool = False
    more: Callable[[_Keys, dict[str, Any], Mapping[str, Any]], None] = lambda *_: None


FAMILIES = {
    family.architecture: family
    for family in (
        Family("llama", "llama", paired=True, more=_llama),
        Family("qwen2", "qwen2"),
        Family("qwen3", "qwen3"),
        Family("gemma2", "gemma2", norm_offset=1.0, more=_gemma2),
        Family("gemma3", "gemma3_text", norm_offset=1.0, more=_gemma3),
        Family("glm4moe", "glm4_moe", partial=True, more=_glm4_moe),
    )
}
"""Families by their architecture. To add one: a row here and a model in ``tests/models/gguf_families.py``."""


def family_of(head: GgufHead, name: str) -> Family:
    """The family of a file.

    Raises:
        UserError: its architecture has none.
    """
    architecture = head.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise not_here(
            name, ValueError(f"its architecture is {architecture}, and only {known} are known here")
        )
    return FAMILIES[architecture]


def model_config(
    head: GgufHead, eos_ids: tuple[int, ...], rope_factors: torch.Tensor | None
) -> PreTrainedConfig:
    """The config of a file's model.

    Args:
        head: its header, of an architecture that has a family.
        eos_ids: token ids that end a text.
        rope_factors: contents of the tensor ``rope_freqs.weight``, if the file has it.

    Raises:
        ValueError: the config cannot express the file; says why.
    """
    family = FAMILIES[head.metadata["general.architecture"]]
    keys = _Keys(head.metadata, family.architecture)
    config = _shared(keys, head, family, rope_factors)
    family.more(keys, config, head.tensors)
    if left := keys.left():
        raise ValueError(f"{left[0]} is not known here")
    for role, known in _SPECIAL.items():
        config[known] = head.metadata.get(f"tokenizer.ggml.{role}_token_id")
    kind: Any = CONFIG_MAPPING[family.model_type]
    try:
        made: PreTrainedConfig = kind(**config, eos_token_id=list(eos_ids))
    except Exception as error:  # each config checks its values in its own way
        raise ValueError(f"transformers refuses its sizes: {error}") from error
    return made


def not_here(name: str, why: Exception) -> UserError:
    """The error for a file that llama.cpp can run and PyTorch cannot."""
    return UserError(
        f"PyTorch cannot run the GGUF file {name} ({first_line(why)[:200]}): use runner auto or llamacpp, or give "
        "the directory that it was made from"
    )


def _shared(keys: _Keys, head: GgufHead, family: Family, rope_factors: torch.Tensor | None) -> dict[str, Any]:
    config = {known: keys.need(key) for key, known in _SIZES.items()}
    heads = config["num_attention_heads"]
    config["num_key_value_heads"] = keys.get("attention.head_count_kv", heads)
    config["head_dim"] = size = keys.get("attention.key_length", config["hidden_size"] // heads)
    for key in ("attention.value_length", *(() if family.partial else ("rope.dimension_count",))):
        if (other := keys.get(key, size)) != size:
            raise ValueError(f"its {key} is {other}, and keys have length {size}")
    if "token_embd.weight" not in head.tensors:
        raise ValueError("it lacks the tensor token_embd.weight")
    config["vocab_size"] = rows = head.tensors["token_embd.weight"].shape[0]
    if (other := keys.get("vocab_size", rows)) != rows:
        raise ValueError(f"it has {rows} embedding rows and names {other} tokens")
    config["tie_word_embeddings"] = "output.weight" not in head.tensors
    config["rope_parameters"] = _rope(keys, family, config, rope_factors)
    return config


def _rope(
    keys: _Keys, family: Family, config: dict[str, Any], factors: torch.Tensor | None
) -> dict[str, Any]:
    """The rotary embedding: GGUF scales positions by keys, or frequencies by a tensor."""
    base = keys.get("rope.freq_base", family.rope_base)
    keys.get("rope.scaling.finetuned")  # says how the model was trained, not how to run it
    factor = keys.get("rope.scaling.factor", 0.0) or keys.get("rope.scale_linear", 0.0) or 1.0
    kind = keys.get("rope.scaling.type", "linear")
    if keys.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ValueError("it scales its attention (rope.scaling.attn_factor)")
    original = keys.get("rope.scaling.original_context_length") or config["max_position_embeddings"]
    if factors is not None:
        if factor != 1.0:
            raise ValueError("it scales both positions and frequencies")
        return _llama3(factors, base, config["head_dim"])
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default", "rope_theta": base}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its positions are scaled by {kind}")
    scaled = {"rope_type": kind, "rope_theta": base, "factor": factor}
    return scaled | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def _llama3(factors: torch.Tensor, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, if these are its divisors of the rotation frequencies."""
    rope = {"rope_type": "llama3", "rope_theta": base, "factor": float(factors.max()), **_LLAMA3}
    if factors.shape != (head_dim // 2,) or not torch.allclose(
        llama3_factors(rope, head_dim), factors, rtol=1e-4
    ):
        raise ValueError("its rotation frequencies are scaled in a way other than Llama 3's")
    return rope


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Divisor of each rotation frequency, ``[head_dim / 2]`` (the rule of Llama 3.1's config).

    Args:
        rope: rope parameters of type "llama3".
        head_dim: length of a key.
    """
    turns = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    wavelength, trained = 2 * math.pi / turns, rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((trained / wavelength - low) / (high - low)).clamp(0, 1)  # 0: slow, divided; 1: fast, unchanged
    factors: torch.Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()
