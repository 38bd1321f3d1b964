"""Conversion of prompts to token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, cast

from transformers import BatchEncoding

from sprinter.engine.chat import ChatMessage, EncodedPrompt, render_chat
from sprinter.engine.tokens import text_ids
from sprinter.errors import UserError, refuse_long
from sprinter.models.pair import LoadedPair

__all__ = ["EncodedPrompt", "PromptInput", "PromptInputs", "encode", "encode_prompt", "is_several"]


PromptInput = str | Sequence[int] | Sequence[ChatMessage] | BatchEncoding | EncodedPrompt
"""One prompt: text, token ids, chat messages, what a tokenizer returns, or what ``encode_prompt`` returned before."""
PromptInputs = (
    list[str]
    | list[list[int]]
    | list[tuple[int, ...]]
    | list[Sequence[int]]
    | list[list[dict[str, str]]]
    | list[list[dict[str, Any]]]
    | list[Sequence[ChatMessage]]
    | list[PromptInput]
    | tuple[PromptInput, ...]
)
"""Several prompts: a list of texts, of lists of token ids, of conversations, or of all of these. Every kind by itself,
as lists are invariant."""


def encode(prompt: PromptInput, pair: LoadedPair) -> list[int]:
    """Token ids of a prompt; see ``encode_prompt``."""
    return encode_prompt(prompt, pair).ids


def encode_prompt(
    prompt: PromptInput,
    pair: LoadedPair,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    longest: int | None = None,
) -> EncodedPrompt:
    """A prompt as token ids, checked against the vocabulary.

    Args:
        prompt: text, token ids, chat messages, a ``BatchEncoding`` of one row, or a prompt that is encoded.
        pair: the loaded models.
        chat_template_kwargs: see ``render_chat``.
        longest: number of tokens far beyond which a text is refused before it is encoded; None: the pair's context.

    Raises:
        UserError: an empty prompt, text without a tokenizer, messages without a chat template or that it refuses, ids
            out of range, or a prompt longer than the context.
    """
    if isinstance(prompt, EncodedPrompt):
        return prompt
    if isinstance(prompt, str):
        if not prompt:
            raise UserError("the prompt is empty: give at least one word to continue")
        if pair.tokenizer is None:
            raise UserError("the prompt is text and this pair has no tokenizer: give token ids")
        encoded = EncodedPrompt(text_ids(prompt, pair, pair.tokenizer, longest=longest), prompt)
    elif isinstance(prompt, Mapping):
        encoded = EncodedPrompt(_from_tokenizer(prompt))
    elif isinstance(prompt, list | tuple) and any(isinstance(item, Mapping) for item in prompt):
        encoded = render_chat(cast(Any, prompt), pair, chat_template_kwargs, longest=longest)
    else:
        encoded = EncodedPrompt(_from_ids(cast(Any, prompt)))
    if chat_template_kwargs and encoded.messages is None:
        raise UserError("chat_template_kwargs goes with messages, and the prompt has none: leave it out")
    ids = encoded.ids
    if not ids:
        raise UserError("the prompt is empty: give at least one token")
    vocab = pair.vocab_size
    outside = next((id for id in ids if not 0 <= id < vocab), None)
    if outside is not None:
        refuse_long("a token id in the prompt", outside)
        raise UserError(
            f"token id {outside} in the prompt is out of range: the vocabulary has {vocab} tokens"
        )
    return encoded


def is_several(prompt: Any) -> bool:
    """Whether the argument is a list of prompts. A list of numbers or of messages is one prompt; an empty list is a
    list of prompts.

    Only the first element is inspected: text, a sequence or a ``BatchEncoding`` is a prompt, a number or another
    mapping is an item of one.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return isinstance(prompt, list | tuple)
    first = prompt[0]
    if isinstance(first, str):  # numpy's strings have ndim 0
        return True
    if isinstance(first, Mapping):
        return "input_ids" in first
    return isinstance(first, Iterable) and not isinstance(first, bytes) and getattr(first, "ndim", 1) > 0


def _from_ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes):
        raise UserError("the prompt is bytes: decode it to text first")
    try:
        return [index(id) for id in prompt]
    except TypeError:
        raise UserError(
            f"the prompt ({type(prompt).__name__}) is neither text nor a flat sequence of whole token ids: give one"
        ) from None


def _from_tokenizer(encoding: Mapping[str, Any]) -> list[int]:
    """Token ids of what a tokenizer returns: lists or tensors, one row, without padding."""
    if "role" in encoding:
        raise UserError("the prompt is a message by itself: give a list of messages, [{...}]")
    if "input_ids" not in encoding:
        raise UserError("the prompt is a mapping without input_ids: give text, messages or token ids")
    ids, mask = (_row(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if ids is None or mask is None:
        return _from_ids(ids or [])
    if len(ids) != len(mask):
        raise UserError(
            f"the prompt has {len(ids)} input_ids and an attention_mask of {len(mask)}: give as many"
        )
    return _from_ids([id for id, kept in zip(ids, mask, strict=True) if kept])


def _row(value: Any) -> Any:
    """The one row of a batch; a value without rows as it is."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not any(isinstance(row, list | tuple) for row in value):
        return value
    if len(value) != 1:
        raise UserError(
            f"the prompt's input_ids have {len(value)} rows: give a list of prompts, one for each row"
        )
    return value[0]
