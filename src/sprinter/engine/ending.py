"""Where a text ends, and turning tokens into text."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError

__all__ = ["Detokenizer", "Ending", "cut_at_stop"]


class Ending:
    """Gives the reason why a text ends after its last token: "eos", "stop", or None.

    Args:
        prompt_len: tokens of the prompt; only what follows counts.
        eos_ids: end-of-sequence tokens.
        stop: strings that end the text wherever they appear, also across tokens and in mid-draft.
    """

    def __init__(
        self,
        prompt_len: int,
        eos_ids: Sequence[int],
        stop: Sequence[str],
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        if stop and tokenizer is None:
            raise UserError("stop strings need a tokenizer, and this pair has none: give stop=[]")
        if any(not isinstance(word, str) or not word for word in stop):
            raise UserError("a stop string is empty or not text: give non-empty strings")
        self._prompt_len, self._eos, self._stop, self._tokenizer = (
            prompt_len,
            frozenset(eos_ids),
            tuple(stop),
            tokenizer,
        )
        # A token may be a part of a character, so a string of n bytes lies within n tokens; some slack is for context.
        self._tail = max((len(word.encode()) for word in stop), default=0) + 4

    def __call__(self, text: Sequence[int]) -> str | None:
        if text[-1] in self._eos:
            return "eos"
        if self._stop and self._tokenizer is not None:
            start = max(self._prompt_len, len(text) - self._tail)
            tail = self._tokenizer.decode(list(text[start:]), skip_special_tokens=True)
            if any(word in tail for word in self._stop):
                return "stop"
        return None


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop string."""
    places = [place for place in (text.find(word) for word in stop) if place >= 0]
    return text[: min(places)] if places else text


_CONTEXT = 16
"""Tokens that are decoded anew with each one that comes, at most: one call a token, of bounded length."""


class Detokenizer:
    """Text of tokens one by one, such that the pieces join to the whole; a piece is "" inside a character.

    Args:
        tokenizer: any transformers tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._begin = self._read = 0  # ids[begin:read] is context whose text, ``known``, was given out
        self._known = ""

    def push(self, id: int) -> str:
        """The text that becomes certain with this token."""
        self._ids.append(id)
        whole = self._decode(self._begin)
        if len(whole) <= len(self._known) or whole.endswith("\ufffd"):
            return ""
        piece = whole[len(self._known) :]
        if len(self._ids) - self._begin > _CONTEXT:
            self._begin = self._read
            whole = self._decode(self._begin)
        self._read, self._known = len(self._ids), whole
        return piece

    def flush(self) -> str:
        """What is left at the end, an unfinished character included."""
        piece = self._decode(self._begin)[len(self._known) :]
        self._begin = self._read = len(self._ids)
        self._known = ""
        return piece

    def _decode(self, begin: int) -> str:
        text = self._tokenizer.decode(self._ids[begin:], skip_special_tokens=True)
        assert isinstance(text, str)
        return text
