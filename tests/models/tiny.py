"""Tiny random models of the families that the runners are compared on, and the reference: the uncached pass."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 61
CONTEXT = 96
WINDOW = 7
"""Sliding and local windows: far shorter than the sequences of the tests."""
SWITCH = 20
"""The most tokens of a text in which models with two rotary embeddings use the first."""

_ENDS = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
_COMMON = {
    **_ENDS,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    # Larger than the usual: logits that a wrong mask or position would visibly change.
    "initializer_range": 0.4,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


def _gpt2(vocab: int = VOCAB) -> PreTrainedModel:
    config = GPT2Config(
        **_ENDS, vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, initializer_range=0.4
    )
    return GPT2LMHeadModel(config)


def _gpt_neo() -> PreTrainedModel:
    config = GPTNeoConfig(
        **_ENDS,
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
    )
    return GPTNeoForCausalLM(config)


def _gemma2() -> PreTrainedModel:
    config = Gemma2Config(
        **_GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW, final_logit_softcapping=2.0
    )
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    """Its layers have a window and a rotary base each: the first attends locally, the second to the whole past."""
    config = Gemma3TextConfig(
        **(_GROUPED | {"pad_token_id": 0}), head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
        },
    )  # fmt: skip
    return Gemma3ForCausalLM(config)


def _opt() -> PreTrainedModel:
    config = OPTConfig(
        **(_ENDS | {"pad_token_id": 1}),
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=48,
        max_position_embeddings=CONTEXT,
        init_std=0.4,
    )
    return OPTForCausalLM(config)


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 3.0, 6.0, 9.0],
    "original_max_position_embeddings": SWITCH,
}


def _phi3(**settings: object) -> PreTrainedModel:
    config = Phi3Config(
        **(_GROUPED | {"pad_token_id": 0}), original_max_position_embeddings=SWITCH, rope_parameters=dict(_LONGROPE),
        **settings,
    )  # fmt: skip
    return Phi3ForCausalLM(config)


def _phimoe() -> PreTrainedModel:
    rope = _LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.4}
    config = PhimoeConfig(
        **_GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=None, rope_parameters=rope
    )
    return PhimoeForCausalLM(config)


def _llama4() -> PreTrainedModel:
    """Its second layer has no rotary embedding: there queries grow with their position."""
    config = Llama4TextConfig(
        **(_GROUPED | {"pad_token_id": 0}), head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
        moe_layers=[], no_rope_layers=[1, 0], attention_chunk_size=16, floor_scale=4, attn_scale=2.0,
    )  # fmt: skip
    return Llama4ForCausalLM(config)


_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}

_MAKERS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": _gpt2,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED, attn_implementation="eager")),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_GROUPED)),
    "qwen2-sliding": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=8)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_COMMON)),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_GROUPED, sliding_window=WINDOW)),
    "llama-longrope": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED, rope_parameters=dict(_LONGROPE))),
    "llama-dynamic": lambda: LlamaForCausalLM(LlamaConfig(**_GROUPED, rope_parameters=dict(_DYNAMIC))),
    "phi3": _phi3,
    "phi3-sliding": lambda: _phi3(sliding_window=WINDOW),
    "phimoe": _phimoe,
    "llama4": _llama4,
    "opt": _opt,
    "gpt_neo": _gpt_neo,
    "mamba": lambda: MambaForCausalLM(
        MambaConfig(**_ENDS, vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)
    ),
}


@cache
def tiny(kind: str) -> PreTrainedModel:
    """One model of the kind, the same in all tests."""
    with torch.random.fork_rng():
        torch.manual_seed(20)
        return _MAKERS[kind]().eval()


def fresh(kind: str) -> PreTrainedModel:
    """A model of the kind that a test may spoil."""
    with torch.random.fork_rng():
        torch.manual_seed(21)
        return _MAKERS[kind]().eval()


def padded_gpt2(rows: int) -> PreTrainedModel:
    """A GPT-2 with so many embedding rows."""
    return _gpt2(rows).eval()


@torch.inference_mode()
def uncached(model: PreTrainedModel, text: list[int]) -> tuple[Tensor, Tensor]:
    """Logits ``[n, vocab]`` and input of the output embedding ``[n, d]`` of one plain pass over the text."""
    seen: list[Tensor] = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    handle.remove()
    return logits, seen[0][0]


def word_tokenizer(words: int = VOCAB, first: str = "w0") -> PreTrainedTokenizerFast:
    """A tokenizer of ``words`` words: w0 (end of text), w1, w2, ..."""
    names = [first] + [f"w{i}" for i in range(1, words)]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[1]))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=names[0], unk_token=names[1])


def save(path: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast | None) -> Path:
    """A model directory, with or without its tokenizer."""
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path
