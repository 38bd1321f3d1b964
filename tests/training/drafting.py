"""Texts and models for the tests of distilling: a tiny Llama with tied embeddings, and its laws."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.models.gguf_files import saved_llama, tiny_llama
from transformers import LlamaForCausalLM

from sprinter.training.drafts.data import TargetText, Texts

VOCAB = 64


def tiny_target(seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(seed, vocab_size=VOCAB, num_hidden_layers=3, tie_word_embeddings=True)


def saved_target(folder: Path) -> Path:
    """A tiny target with a byte-level tokenizer, in a folder."""
    saved_llama(folder, 5, tie_word_embeddings=True)
    return folder


@torch.no_grad()
def text(target: LlamaForCausalLM, seed: int, *, held_out: bool = False, top: int = 16) -> TargetText:
    """A random text with the target's laws for all tokens after its first five."""
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (12 + seed % 5,), generator=chance)
    laws = target(ids[None]).logits[0, 4:-1].softmax(-1).topk(top)
    return TargetText(ids, 5, laws.indices, laws.values, "even" if seed % 2 == 0 else "odd", held_out)


def texts(target: LlamaForCausalLM, count: int = 40, temperature: float = 1.0) -> Texts:
    every = tuple(text(target, seed, held_out=seed % 8 == 0) for seed in range(count))
    return Texts(every, {"hash": "of these texts", "settings": {"temperature": temperature}})
