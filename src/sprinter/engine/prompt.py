"""Conversion of prompts to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair

__all__ = ["PromptInput", "PromptInputs", "encode", "is_several"]

PromptInput = str | Sequence[int]
"""One prompt: text, or token ids."""
PromptInputs = (
    list[str]
    | list[list[int]]
    | list[tuple[int, ...]]
    | list[Sequence[int]]
    | list[PromptInput]
    | tuple[PromptInput, ...]
)
"""Several prompts: a list of texts, of lists of token ids, or of both. Every kind by itself, as lists are invariant."""

_CHARS_PER_TOKEN = 32  # more than in almost any text


def encode(prompt: PromptInput, pair: LoadedPair) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary.

    Raises:
        UserError: an empty prompt, text without a tokenizer, ids out of range, or a prompt longer than the context.
    """
    ids = _from_text(prompt, pair) if isinstance(prompt, str) else _from_ids(prompt)
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    outside = next((id for id in ids if not 0 <= id < pair.vocab_size), None)
    if outside is not None:
        raise UserError(
            f"token id {outside} in the prompt is out of range: the vocabulary has {pair.vocab_size} tokens"
        )
    return ids


def is_several(prompt: Any) -> bool:
    """Whether the argument is a list of prompts. A list of numbers is one prompt; an empty list is a list of prompts.

    Only the first element is inspected: text or a sequence is a prompt, a number or a mapping is an item of one.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return isinstance(prompt, list | tuple)
    first = prompt[0]
    if isinstance(first, str):  # numpy's strings have ndim 0
        return True
    return (
        isinstance(first, Iterable)
        and not isinstance(first, Mapping | bytes)
        and getattr(first, "ndim", 1) > 0
    )


def _from_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes):
        raise UserError("the prompt is bytes: decode it to text first")
    try:
        return [index(id) for id in prompt]
    except TypeError:
        raise UserError(
            f"the prompt ({type(prompt).__name__}) is neither text nor a flat sequence of whole token ids: give one"
        ) from None


def _from_text(prompt: str, pair: LoadedPair) -> list[int]:
    if not prompt:
        raise UserError("the prompt is empty: give at least one word to continue")
    if pair.tokenizer is None:
        raise UserError("the prompt is text and this pair has no tokenizer: give token ids")
    # Encoding megabytes is slow: a prompt far beyond the context is rejected by the length of its first part.
    part = prompt[: _CHARS_PER_TOKEN * pair.longest]
    ids = list(pair.tokenizer(part, verbose=False)["input_ids"])
    if len(part) == len(prompt):
        return ids
    if len(ids) > pair.longest:
        raise UserError(
            f"the prompt has {len(prompt)} characters, and the first {len(part)} of them alone exceed the context of "
            f"the pair, {pair.longest} tokens: shorten the prompt"
        )
    return list(pair.tokenizer(prompt, verbose=False)["input_ids"])
