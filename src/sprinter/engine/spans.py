"""Whether the next token of a text is in a span such as a code block, for methods with ``only=``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from sprinter.decode.spans import OUTSIDE, SPANS, TextSpan
from sprinter.engine.stream import Detokenizer, Spelling, special_ids

__all__ = ["SpanReader"]


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a text: its last characters since the last match, and what ends the span that it is in."""

    detokenizer: Detokenizer
    tail: str = "\n"
    closing: re.Pattern[str] | None = None

    def read(self, text: str, span: TextSpan) -> _End:
        """The end of the text with ``text`` appended."""
        tail, closing = self.tail + text, self.closing
        while found := (closing or span.opening).search(tail):
            tail, closing = tail[found.end() :], span.closing(found) if closing is None else None
        return replace(self, tail=span.kept(tail), closing=closing)


class SpanReader:
    """Returns whether the token after a text may be lossy, by the method's ``only``.

    The span may have been opened in the prompt, after its last special token: by a chat template that writes
    ``<think>``, or by a prompt that ends within a code block. Call it with texts as in ``Ending``.

    Args:
        only: see ``Method``.
        prompt: token ids.
        spelling: how tokens become text.
    """

    def __init__(self, only: str, prompt: Sequence[int], spelling: Spelling) -> None:
        self._span, self._wanted = SPANS[only.removeprefix(OUTSIDE)], not only.startswith(OUTSIDE)
        self._spelling, self._prompt_len = spelling, len(prompt)
        written = self._written(prompt)
        start = _End(spelling.detokenizer()).read(written, self._span)
        self._places = [start]  # place i is after i tokens of the text

    def __call__(self, text: Sequence[int]) -> bool:
        del self._places[max(1, len(text) - self._prompt_len) :]  # the last token may be another than before
        for id in text[self._prompt_len + len(self._places) - 1 :]:
            last = self._places[-1]
            place = replace(last, detokenizer=copy(last.detokenizer))
            new = self._spelling.written(id) or place.detokenizer.push(id)
            self._places.append(place.read(new, self._span))
        return (self._places[-1].closing is not None) == self._wanted

    def _written(self, prompt: Sequence[int]) -> str:
        """The prompt's text after its last special token that is not a mark of the span itself."""
        tokenizer, start = self._spelling.tokenizer, 0
        special = special_ids(tokenizer)
        for i, id in enumerate(prompt):
            if id in special and tokenizer.decode([id]) not in self._span.marks:
                start = i + 1
        ids = list(prompt[start:])
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
