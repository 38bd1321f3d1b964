"""Whether the next token of a text is in a span such as a code block, for methods with ``only=``."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from sprinter.decode.spans import OUTSIDE, SPANS, TextSpan
from sprinter.engine.ending import Detokenizer, Spelling

__all__ = ["SpanReader"]


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a text: whether it is in the span, and its last characters since the last match."""

    detokenizer: Detokenizer
    tail: str = "\n"
    inside: bool = False

    def read(self, text: str, span: TextSpan) -> _End:
        """The end of the text with ``text`` appended."""
        tail, inside = self.tail + text, self.inside
        while found := (span.closing if inside else span.opening).search(tail):
            tail, inside = tail[found.end() :], not inside
        return replace(self, tail=tail[-span.reach :], inside=inside)


class SpanReader:
    """Returns whether the token after a text may be lossy, by the method's ``only``.

    The span may have been opened in the prompt, after its last special token: by a chat template that writes
    ``<think>``, or by a prompt that ends within a code block. Texts are called with as in ``Ending``.

    Args:
        only: see ``Method``.
        prompt: token ids.
        spelling: how tokens become text.
    """

    def __init__(self, only: str, prompt: Sequence[int], spelling: Spelling) -> None:
        self._span, self._wanted = SPANS[only.removeprefix(OUTSIDE)], not only.startswith(OUTSIDE)
        self._spelling, self._prompt_len = spelling, len(prompt)
        written = self._written(prompt)
        start = _End(Detokenizer(spelling.tokenizer, spelling.silent)).read(written, self._span)
        self._places = [start]  # place i is after i tokens of the text

    def __call__(self, text: Sequence[int]) -> bool:
        del self._places[max(1, len(text) - self._prompt_len) :]  # the last token may be another than before
        for id in text[self._prompt_len + len(self._places) - 1 :]:
            last = self._places[-1]
            place = replace(last, detokenizer=copy(last.detokenizer))
            new = self._spelling.written(id) or place.detokenizer.push(id)
            self._places.append(place.read(new, self._span))
        return self._places[-1].inside == self._wanted

    def _written(self, prompt: Sequence[int]) -> str:
        """The prompt's text after its last special token that is not a mark of the span itself."""
        start = 0
        for i, id in enumerate(prompt):
            mark = self._spelling.written(id)
            if mark and not (self._span.opening.search(mark) or self._span.closing.search(mark)):
                start = i + 1
        ids = list(prompt[start:])
        text = self._spelling.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
