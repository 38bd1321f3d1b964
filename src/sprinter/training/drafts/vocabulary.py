"""Which tokens a draft with a cut vocabulary needs: those that texts like the user's hold most often."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.files import write_atomic, writing
from sprinter.models.pair import LoadedPair
from sprinter.models.reduced_vocab import VOCABULARY_FORMAT, frequent_tokens
from sprinter.training.examples import Example, read_examples

__all__ = ["choose_vocabulary"]

_HELD_OUT = 10
"""One text in so many is counted apart."""
_FEW = 2 * _HELD_OUT


def choose_vocabulary(
    models: LoadedPair,
    data: Sequence[str],
    size: int,
    out: Path,
    *,
    field: str | None = None,
    split: str = "lines",
    limit: int | None = None,
) -> dict[str, Any]:
    """Count the tokens of texts, write the most frequent ones to a file, and say how many tokens they cover.

    Of a record with an answer, the answer is counted: it is what a draft writes. The share of tokens covered is
    measured on every tenth text, with the choice made on the others; the file's tokens are chosen on all.

    Args:
        models: the pair, or the target alone, whose tokenizer counts.
        data, field, split: as in ``read_examples``. size: number of tokens. limit: maximum number of texts.

    Returns:
        What the file holds, without the ids.

    Raises:
        UserError: too few texts, no tokenizer, a size out of range, or the file cannot be written.
    """
    tokenizer = models.tokenizer
    if tokenizer is None:
        raise UserError("the target has no tokenizer to count tokens with: give tokenizer=...")
    ends = models.target.eos_ids
    words = min(models.vocab_size, max(tokenizer.get_vocab().values()) + 1)
    if not len(ends) < size <= words:
        raise UserError(f"size={size}: give a number of tokens from {len(ends) + 1} to {words}")
    texts = [*islice(_texts(tokenizer, data, field, split), limit)]
    if len(texts) < _FEW:
        raise UserError(f"{len(texts)} texts are too few to count tokens in: give {_FEW} or more")
    apart = torch.cat(texts[::_HELD_OUT])
    rest = [text for i, text in enumerate(texts) if i % _HELD_OUT]
    sizes = sorted({size, *(2**power for power in range(12, 18) if len(ends) < 2**power <= words)})
    covered = {
        str(count): float(torch.isin(apart, frequent_tokens(rest, count, words, ends)).float().mean())
        for count in sizes
    }
    facts = {
        "format": VOCABULARY_FORMAT, "vocabulary": words, "size": size, "texts": len(texts),
        "tokens": sum(map(len, texts)), "covered": covered,
    }  # fmt: skip
    ids = frequent_tokens(texts, size, words, ends).tolist()
    with writing(out, "give another --out"):
        write_atomic(out, json.dumps({**facts, "ids": ids}) + "\n")
    return facts


def _texts(
    tokenizer: PreTrainedTokenizerBase, data: Sequence[str], field: str | None, split: str
) -> Iterator[Tensor]:
    for found in read_examples(data, field, split, whole=True):
        ids = tokenizer.encode(_text(found), add_special_tokens=False, verbose=False)
        if ids:
            yield torch.tensor(ids)


def _text(found: str | Example) -> str:
    if isinstance(found, str):
        return found
    if found.answer is not None:
        return found.answer
    if isinstance(found.prompt, str):
        return found.prompt
    return "\n".join(str(message["content"]) for message in found.prompt)
