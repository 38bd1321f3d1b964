"""Tiny models with a tokenizer, saved as directories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT, HIDDEN = 16384, 32  # long enough for a stream that outlasts a test


class Ended(NamedTuple):
    """What a run of the command line left."""

    status: int
    out: str
    err: str


Run = Callable[..., Ended]


@dataclass(frozen=True)
class Places:
    """Directories of the tiny pair, good and broken."""

    target: Path
    draft: Path
    gate: Path
    root: Path

    @property
    def pair(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.draft)]

    @property
    def gated(self) -> list[str]:
        return [*self.pair, "--gate", str(self.gate)]


def tiny_tokenizer(extra: int = 0) -> PreTrainedTokenizerFast:
    """One token a byte, and ``extra`` words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*(f"<{i}>" for i in range(extra)), *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_tiny(
    directory: Path, seed: int, layers: int = 2, extra: int = 0, broken: bool = False
) -> LlamaForCausalLM:
    """A random Llama that writes printable ASCII."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer(extra)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    letters = torch.tensor([len(tokenizer.decode([i]).strip()) == 1 and tokenizer.decode([i]).isascii()
                            for i in range(len(tokenizer))])  # fmt: skip
    with torch.no_grad():
        model.lm_head.weight[letters] *= 20
        if broken:
            model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model
