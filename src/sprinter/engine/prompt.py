"""From a prompt to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any

from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair

__all__ = ["PromptInput", "PromptInputs", "encode", "is_several"]

PromptInput = str | Sequence[int]
"""One prompt: text, or token ids."""
PromptInputs = list[str] | list[list[int]] | list[PromptInput] | tuple[PromptInput, ...]
"""Several prompts: a list of texts, of lists of token ids, or of both."""

_CHARS_PER_TOKEN = 32  # hardly any text has more


def encode(prompt: PromptInput, pair: LoadedPair) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary.

    Raises:
        UserError: empty, without a tokenizer, ids out of range, or so long that even its first part does not fit.
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
    """Whether it is a list of prompts. A list of numbers is one prompt, given as token ids; an empty list holds none.

    Looks at the first element alone: text or a sequence is a prompt, a mapping or a number is a part of one.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return isinstance(prompt, list | tuple)
    first = prompt[0]
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
    # Encoding megabytes takes long: a prompt far beyond the context is refused by its first part.
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
