"""Shared by the tests of labelling: a tiny pair in memory, texts of its words, a data set of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tests.models.tiny import VOCAB, fresh, tiny, uncached, word_tokenizer
from torch import Tensor

import sprinter
from sprinter.training.records import Records

NEW = 6
"""New tokens per text by default."""


@cache
def tiny_pair(target: str = "llama", draft: str = "gpt2") -> sprinter.Pair:
    """Two random models over w0 (end of text), w1, ..., w60; context 96."""
    return sprinter.load_pair(tiny(target), draft=fresh(draft), tokenizer=word_tokenizer())


def words(count: int, seed: int = 0) -> str:
    """A text of ``n`` words, one token each (the tokenizer finds w0 and w1, which are special, within others)."""
    chance = random.Random(seed)
    return " ".join(f"w{chance.randrange(20, VOCAB)}" for _ in range(count))


def write_texts(file: Path, lengths: Sequence[int]) -> Path:
    """A text file with a line of each length, in words."""
    file.write_text("\n".join(words(n, seed) for seed, n in enumerate(lengths)) + "\n", encoding="utf-8")
    return file


def laws_of(pair: sprinter.Pair, text: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Reference, one forward pass per model: q and p logits ``[n, V]`` at each token, hidden states ``[n, d]``."""
    assert pair.models.draft is not None
    q, hidden = uncached(pair.models.draft.model, list(text))
    p, _ = uncached(pair.models.target.model, list(text))
    return q.double(), p.double(), hidden


def same_records(one: Records, other: Records, tolerance: float) -> bool:
    """Whether whole numbers are equal, and floats within the tolerance (absolute, or relative above 1)."""
    assert len(one) == len(other)
    for name, column in one.columns().items():
        there = other.columns()[name]
        if not column.is_floating_point():
            if not torch.equal(column, there):
                return False
        elif not torch.allclose(column, there, atol=tolerance, rtol=tolerance):
            return False
    return True
