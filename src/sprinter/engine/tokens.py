"""Token ids of texts, without encoding megabytes that cannot fit."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair

__all__ = ["text_ids"]

_CHARS_PER_TOKEN = 32  # more than in almost any text


def text_ids(
    text: str, pair: LoadedPair, tokenizer: PreTrainedTokenizerBase, *, special: bool = True
) -> list[int]:
    """Token ids of a text.

    Args:
        special: whether the tokenizer adds its special tokens (BOS).

    Raises:
        UserError: the text is far longer than the context, or holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"the prompt is no text: character {error.start} is half of a surrogate pair; decode it from UTF-8 anew"
        ) from None
    # Encoding megabytes is slow: a prompt far beyond the context is rejected by the length of its first part.
    part = text[: _CHARS_PER_TOKEN * pair.longest]
    ids = list(tokenizer(part, add_special_tokens=special, verbose=False)["input_ids"])
    if len(part) == len(text):
        return ids
    if len(ids) > pair.longest:
        raise UserError(
            f"the prompt has {len(text)} characters, and the first {len(part)} of them alone exceed the context of "
            f"the pair, {pair.longest} tokens: shorten the prompt"
        )
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
