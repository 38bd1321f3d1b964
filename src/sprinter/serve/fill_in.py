"""Completions with a suffix, for models that were trained to fill in the middle of a text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sprinter.engine.tokens import text_ids
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair
from sprinter.serve.api_errors import Refusal

__all__ = ["fill_in", "fill_in_marks"]

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder # noqa: RUF001
)
"""Tokens before the prompt, the suffix and the text, by family."""
_OTHERS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")  # behind which another file begins


def _known(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    vocabulary = tokenizer.get_vocab()
    marks = next((marks for marks in _MARKS if all(mark in vocabulary for mark in marks)), None)
    if marks is None:
        message = "this model was not trained to fill in a text, as suffix asks: leave it out"
        raise Refusal(400, message, "unsupported_field", "suffix")
    return tuple(vocabulary[mark] for mark in (*marks, *_OTHERS) if mark in vocabulary)


def fill_in(prompt: str | Sequence[int], suffix: str, pair: LoadedPair) -> list[int]:
    """The prompt of a text between ``prompt`` and ``suffix``, as token ids.

    Raises:
        Refusal: the model has no tokens for it.
    """
    tokenizer = pair.tokenizer
    if tokenizer is None or not isinstance(prompt, str):
        raise UserError("suffix goes with a prompt that is text: give text, to a pair that has a tokenizer")
    before, behind, middle = _known(tokenizer)[:3]
    parts = [text_ids(part, pair, tokenizer, special=False) for part in (prompt, suffix)]
    return [before, *parts[0], behind, *parts[1], middle]


def fill_in_marks(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens at which a text that is filled in ends, besides EOS."""
    return _known(tokenizer)
