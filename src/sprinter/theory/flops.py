"""Forward FLOPs of a model from its configuration, and of a method by two counts.

A model's count is ``sprinter.models.flops.forward_flops`` (Hoffmann et al. 2022, Appendix F). A method has two:

* *passes*: every forward pass of a model counts as one token, as in the SPRINTER paper's equation 6;
* *tokens*: every token that a model processes counts. The target's KV cache needs all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GPT2Config, GPTNeoConfig, PreTrainedConfig

from sprinter.errors import UserError, did_you_mean
from sprinter.models.flops import forward_flops
from sprinter.models.gguf.load import GgufModel
from sprinter.models.source import find, load_error

__all__ = ["ARCHITECTURES", "PAPER_TABLE", "MethodFlops", "config_of", "method_flops"]


def _gpt2(d: int, layers: int, heads: int) -> Callable[[], PreTrainedConfig]:
    return lambda: GPT2Config(n_embd=d, n_layer=layers, n_head=heads)


def _neo(d: int, layers: int, heads: int) -> Callable[[], PreTrainedConfig]:
    types = [[["global", "local"], layers // 2]]
    return lambda: GPTNeoConfig(hidden_size=d, num_layers=layers, num_heads=heads, attention_types=types)


ARCHITECTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "gpt-neo-125m": _neo(768, 12, 12),
    "gpt-neo-1.3b": _neo(2048, 24, 16),
    "gpt-neo-2.7b": _neo(2560, 32, 20),
}
"""Architectures known by name, for use without network access."""

PAPER_TABLE: Mapping[str, float] = {
    "gpt2": 7.25,
    "gpt2-xl": 71.78,
    "gpt-neo-125m": 8.01,
    "gpt-neo-1.3b": 64.66,
}
"""SPRINTER, Appendix A.8: billions of FLOPs for 20 tokens. By the formula of the other rows the last would be 64.65."""


def config_of(name: str) -> PreTrainedConfig:
    """Configuration of a named architecture, a directory, a hub id or a GGUF file.

    Raises:
        UserError: the name is none of these, or the hub cannot be reached.
    """
    if name.lower() in ARCHITECTURES:
        return ARCHITECTURES[name.lower()]()
    directory = Path(name).expanduser()
    if directory.suffix == ".gguf" and not directory.is_dir():
        file = find(name, "model").gguf
        assert file is not None
        return GgufModel(file, "cpu").config
    if not directory.is_dir() and "/" not in name:
        raise did_you_mean("architecture", name, list(ARCHITECTURES))
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise UserError(f"'{name}' has no config.json: give a Hugging Face model directory")
    try:
        config: Any = AutoConfig.from_pretrained(directory if directory.is_dir() else name)
        forward_flops(config)
    except UserError:
        raise
    except AttributeError as error:
        raise UserError(f"'{name}' is not a decoder-only language model ({error}): give one") from None
    except Exception as error:
        raise load_error(error, name, "model") from error
    assert isinstance(config, PreTrainedConfig)
    return config


@dataclass(frozen=True, slots=True)
class MethodFlops:
    """FLOPs per new token by both counts, absolute and relative to plain decoding with the target."""

    passes: float
    tokens: float
    passes_ratio: float
    tokens_ratio: float


def method_flops(
    calls: float,
    tokens_read: float,
    draft_steps: float,
    gate_scores: float,
    target: float,
    draft: float,
    gate: float,
) -> MethodFlops:
    """The two counts of a method.

    Args:
        calls, tokens_read, draft_steps, gate_scores: counts per new token (a ``Prediction`` has them).
        target, draft, gate: FLOPs of one token in each model.
    """
    drafting = draft_steps * draft + gate_scores * gate
    passes, tokens = calls * target + drafting, tokens_read * target + drafting
    return MethodFlops(passes, tokens, passes / target, tokens / target)
