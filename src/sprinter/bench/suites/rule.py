"""Split a text into a prompt (its beginning) and a reference (its continuation)."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from itertools import islice

from transformers import PreTrainedTokenizerBase

from sprinter.decode.checks import at_least
from sprinter.decode.registry import did_you_mean
from sprinter.errors import UserError

__all__ = ["TextRule"]


@dataclass(frozen=True, slots=True)
class TextRule:
    """The prompt is the first share of a text's words (SPRINTER, section 4: the first 30 %).

    Attributes:
        share: share of the words, at least one word; 1 without ``words`` and ``tokens``: the whole text.
        words: maximum number of words; longer prompts are truncated. 0: no truncation.
        tokens: maximum number of the pair's tokens; longer prompts are truncated at the end of a word. With ``share=1``
            shorter texts are skipped, so that all prompts are about this long (long-form generation).
        min_words: minimum number of words; shorter texts are skipped.
        paragraphs: each line of a text is a separate text; the first lines of all texts come first.

    Raises:
        ValueError: a value out of range.
    """

    share: float = 0.3
    words: int = 0
    tokens: int = 0
    min_words: int = 10
    paragraphs: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must be above 0 and at most 1")
        for name, least in (("words", 0), ("tokens", 0), ("min_words", 1)):
            at_least(name, getattr(self, name), least)

    @classmethod
    def whole(cls) -> TextRule:
        """Take whole texts as prompts, without references."""
        return cls(share=1.0, min_words=1)

    @classmethod
    def long_form(cls, tokens: int) -> TextRule:
        """Take prompts of ``tokens`` tokens, for answers up to the context limit (SVIP, section 3.2)."""
        at_least("long", tokens, 1)
        return cls(share=1.0, tokens=tokens, min_words=1)

    @classmethod
    def parse(cls, text: str, base: TextRule | None = None) -> TextRule:
        """Parse "whole", "long=64", or settings such as "share=0.5,words=200,min_words=60", which change ``base``.

        Raises:
            UserError: what is wrong and how to fix it.
        """
        if text.strip() == "whole":
            return cls.whole()
        values: dict[str, float | int | bool] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals:
                raise UserError(
                    f"'{part}' in the prompt rule is not a setting: write whole, long=64 or share=0.5"
                )
            values[name] = _value(name, value)
        if "long" in values:
            if len(values) > 1:
                raise UserError(
                    f"long in the prompt rule '{text}' goes with no other setting: write long=64 alone"
                )
            return cls.long_form(int(values["long"]))
        try:
            return replace(base or cls(), **values)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"the prompt rule '{text}' cannot be used: {error}") from None

    @property
    def takes_whole(self) -> bool:
        """Whether the prompt is the whole text."""
        return self.share == 1 and not self.words and not self.tokens

    @property
    def is_long_form(self) -> bool:
        """Whether all prompts have about the same number of tokens."""
        return self.share == 1 and self.tokens > 0

    def __str__(self) -> str:
        if self.takes_whole:
            return "texts as they are"
        parts = ["the beginning" if self.share == 1 else f"first {100 * self.share:g} % of the words"]
        parts += [f"at most {self.words} words"] * bool(self.words)
        parts += [f"at most {self.tokens} tokens"] * bool(self.tokens)
        kind = "paragraphs" if self.paragraphs else "texts"
        long = f" of {self.min_words} words or more" if self.min_words > 1 else ""
        return f"{', '.join(parts)}, of {kind}{long}"

    def cut(self, text: str, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[str, str]:
        """Split a text into prompt and continuation, without the space between them.

        Both are "" if the text gives no prompt: it is too short, or its first word exceeds ``tokens``.

        Args:
            text: one text, or one paragraph.
            tokenizer: the pair's tokenizer, needed for ``tokens``.

        Raises:
            UserError: the rule counts tokens and there is no tokenizer.
        """
        count = len(text.split())
        if count < self.min_words:
            return "", ""
        if self.takes_whole:
            return text, ""
        most = max(1, int(self.share * count))
        most = min(most, self.words) if self.words else most
        if self.tokens:
            # A word has at least one token, so words beyond these are not part of the prompt.
            ends = _ends(text, min(most, self.tokens))
            most = bisect_right(ends, self.tokens, key=lambda end: _length(text[:end], tokenizer))
            if most == 0:  # the first word alone is too long
                return "", ""
        end = _ends(text, most)[-1]
        prompt, rest = text[:end], text[end:].strip()
        return (prompt, rest) if rest else ("", "")


def _ends(text: str, count: int) -> list[int]:
    """End offsets of the first ``count`` words."""
    return [match.end() for match in islice(re.finditer(r"\S+", text), count)]


def _length(text: str, tokenizer: PreTrainedTokenizerBase | None) -> int:
    if tokenizer is None:
        raise UserError("this prompt rule counts tokens: give the pair's tokenizer, or cut by words")
    return len(tokenizer(text, verbose=False)["input_ids"])


def _value(name: str, text: str) -> float | int | bool:
    kinds = {field.name: str(field.type) for field in fields(TextRule)} | {"long": "int"}
    if name not in kinds:
        raise did_you_mean("setting of the prompt rule", name, list(kinds))
    try:
        if kinds[name] == "bool":
            return {"true": True, "false": False}[text.lower()]
        return float(text) if kinds[name] == "float" else int(text)
    except (ValueError, KeyError):
        raise UserError(
            f"'{text}' is not a value for {name} in the prompt rule: give a {kinds[name]}"
        ) from None
