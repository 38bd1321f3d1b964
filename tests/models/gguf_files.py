"""GGUF files for tests: tiny Llamas with a byte-level tokenizer, converted on the spot."""

from pathlib import Path

import torch
from tests.models.tiny import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sprinter.models.convert import convert_gguf

NO_LLAMA = "llama-cpp-python is not installed: pip install '.[gguf]'"
NO_GGUF = "the package gguf is not installed: pip install '.[gguf]'"
EXTRA = 4  # embedding rows beyond the tokenizer's tokens


def byte_tokenizer(word: str = "th") -> PreTrainedTokenizerFast:
    """One token a byte, an end of text, and one merge, which makes ``word``."""
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), word]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[(word[0], word[1])]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A random Llama with grouped heads whose logits a wrong position would visibly change."""
    sizes = {
        "vocab_size": len(byte_tokenizer()) + EXTRA,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def saved_llama(directory: Path, seed: int = 0, word: str = "th", **changes: object) -> LlamaForCausalLM:
    """The same in a directory with its tokenizer."""
    model = tiny_llama(seed, **changes)
    save(directory, model, byte_tokenizer(word))
    return model


def converted(directory: Path, dtype: str = "f32") -> Path:
    """The file of a directory's model, beside it."""
    return convert_gguf(directory, directory.with_name(f"{directory.name}-{dtype}.gguf"), dtype)
