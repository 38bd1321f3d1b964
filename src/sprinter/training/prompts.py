"""Prompts: the rule that splits a text into prompt and continuation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.training.examples import Example, ExampleEncoder

__all__ = ["Prompt", "PromptRule", "PromptSplitter"]

_CHARS_PER_TOKEN = 32  # more than nearly any text has; encoding whole megabytes would be slow


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a text, and its continuation.

    Attributes:
        index: number of the text in the input.
        ids: token ids of the prompt, at least one.
        original: the ``new_tokens`` token ids that follow in the text; (): an example without an answer.
    """

    index: int
    ids: tuple[int, ...]
    original: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptRule:
    """The prompt is the first share of a text's words, up to a number of tokens (SPRINTER: the first 30 %).

    Args:
        share: share of the words, at least one word.
        prompt_tokens: maximum length; longer prompts are truncated. 0: no truncation.
        new_tokens: tokens that must follow in the text, so that all prefix classes have the same prompts.
        context: maximum number of tokens of a prompt with its new tokens.
    """

    share: float
    prompt_tokens: int
    new_tokens: int
    context: int


class PromptSplitter:
    """Turn texts into prompts, and count the texts that are skipped.

    Args:
        rule: splits running text.
        tokenizer, vocab_size: of the pair.
        examples: encodes examples, whose prompts the rule does not touch; None: there are none.

    Attributes:
        skipped: number of texts without a prompt, by reason: "too_long" (beyond the context), "too_short" (fewer than
            ``new_tokens`` tokens after the prompt), "empty" (a record without text).
        texts: number of texts seen.
    """

    def __init__(
        self,
        rule: PromptRule,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        examples: ExampleEncoder | None = None,
    ) -> None:
        self._rule, self._tokenizer, self._vocab = rule, tokenizer, vocab_size
        self._examples = examples
        self.skipped = {"too_long": 0, "too_short": 0, "empty": 0}
        self.texts = 0

    def __call__(self, texts: Iterable[str | Example]) -> Iterator[Prompt]:
        """Yield the prompts of the usable texts, in order.

        Raises:
            UserError: a token id outside the pair's common vocabulary; an example that cannot be encoded.
        """
        for index, text in enumerate(texts):
            self.texts = index + 1
            reason, ids, length = self._split(text)
            if reason:
                self.skipped[reason] += 1
            else:
                original = ids[length : length + self._rule.new_tokens]
                yield Prompt(index, tuple(ids[:length]), tuple(original))

    def _split(self, text: str | Example) -> tuple[str, list[int], int]:
        """Reason to skip the text ("": none), its first token ids, and the number of them that are the prompt."""
        if isinstance(text, Example):
            assert self._examples is not None, "examples need an encoder"
            reason, ids, length = self._examples(text)
            self._check(ids)
            return reason, ids, length
        rule = self._rule
        words = len(text.split())
        if not words:
            return "empty", [], 0
        most = rule.prompt_tokens or rule.context
        count = min(max(1, int(rule.share * words)), most)
        # A word has at least one token, so words beyond these are not needed.
        ends = [match.end() for match in islice(re.finditer(r"\S+", text), count + rule.new_tokens)]
        end, last = ends[count - 1], ends[-1]
        room = _CHARS_PER_TOKEN * (most + rule.new_tokens)
        ids = self._encode(text[: min(last, room)])
        length = most if count == most else min(len(self._encode(text[: min(end, room)])), most)
        if length + rule.new_tokens > rule.context:
            return "too_long", ids, length
        if length < 1 or len(ids) < length + rule.new_tokens:
            return "too_short", ids, length
        self._check(ids)
        return "", ids, length

    def _check(self, ids: list[int]) -> None:
        if ids and max(ids) >= self._vocab:
            raise UserError(
                f"the tokenizer gives token id {max(ids)}, the pair's common vocabulary has {self._vocab} tokens: "
                "give the tokenizer that both models were trained with"
            )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])
