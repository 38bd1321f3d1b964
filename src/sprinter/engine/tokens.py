"""Token ids of texts, without encoding megabytes that cannot fit."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from sprinter.errors import ContextLengthError, UserError
from sprinter.models.pair import LoadedPair

__all__ = ["check_text", "encoded", "text_ids"]

_CHARS_PER_TOKEN = 32  # more than in almost any text


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool = True) -> list[int]:
    """Token ids of a text. ``special``: with those that the tokenizer adds; no BOS before one that the text has."""
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if not special or bos is None or ids[:2] != [bos, bos]:
        return ids
    own = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    added = _count(ids, bos) > _count(own, bos) > 0
    return ids[1:] if added else ids


def _count(ids: list[int], first: int) -> int:
    """How often a token stands at the beginning."""
    return next((i for i, id in enumerate(ids) if id != first), len(ids))


def check_text(name: str, text: str) -> None:
    """Raise a UserError if the text holds half of a surrogate pair, which tokenizers do not read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} is not text: character {error.start} is half of a surrogate pair; decode it from UTF-8 anew"
        ) from None


def text_ids(
    text: str,
    pair: LoadedPair,
    tokenizer: PreTrainedTokenizerBase,
    *,
    special: bool = True,
    longest: int | None = None,
) -> list[int]:
    """Token ids of a text.

    Args:
        special: whether the tokenizer adds its special tokens (BOS); see ``encoded``.
        longest: maximum number of tokens; None: the context of the pair.

    Raises:
        ContextLengthError: the text is far longer than that. UserError: it holds half of a surrogate pair.
    """
    check_text("the prompt", text)
    # Encoding megabytes is slow: a prompt far beyond the limit is rejected by the length of its first part.
    most = pair.longest if longest is None else longest
    size = _CHARS_PER_TOKEN * most
    while size < len(text):
        if len(encoded(tokenizer, text[:size], special=special)) > most:
            raise ContextLengthError(
                f"this model's maximum context length is {most} tokens here, and of the prompt's {len(text)} "
                f"characters the first {size} alone exceed it: shorten the prompt"
            )
        size *= 2
    return encoded(tokenizer, text, special=special)
