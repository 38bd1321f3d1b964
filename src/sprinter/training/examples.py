"""Examples: records that hold a prompt of their own, and maybe its answer, and texts as prompts in chat form.

A record is an example if it has "messages" (a last message of the assistant is the answer), or a field "prompt" or
"question" and one of ``ANSWERS``. In chat form every text is an example: what a user says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sprinter.engine.chat import conversation
from sprinter.engine.prompt import encode_prompt
from sprinter.engine.tokens import text_ids
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair
from sprinter.training.sources import FIELDS, MESSAGES, is_record, prompt_of, read_records

__all__ = ["ANSWERS", "Example", "ExampleEncoder", "read_examples", "reader_of"]

ANSWERS = ("answer", "response", "completion", "canonical_solution")
"""Fields that may hold the answer to a record's "prompt" or "question", in order of preference."""
_CHARS_PER_TOKEN = 32  # more than nearly any text has


@dataclass(frozen=True, slots=True)
class Example:
    """A whole prompt.

    Attributes:
        prompt: text or messages.
        answer: what follows; None: that is not known, the models write it.
        where: location in the data, for messages.
    """

    prompt: str | list[Any]
    answer: str | None
    where: str


def read_examples(
    sources: Sequence[str],
    field: str | None = None,
    split: str = "lines",
    *,
    chat: bool = False,
    system: str | None = None,
    whole: bool = False,
) -> Iterator[str | Example]:
    """Yield the examples of all sources, and the other texts, in order.

    Args:
        sources: files or data set names.
        field: field of a record that holds running text, or messages; dots lead into nested objects. None: messages,
            or the first of ``FIELDS`` that the record has.
        split: unit of plain text files, one of ``SPLITS``; not used for records and blocks.
        chat: every text is what a user says; otherwise running text stays text.
        system: system message before all of them, in chat form.
        whole: a field "prompt", "question" or "turns" is a whole prompt without an answer too, not running text.

    Raises:
        UserError: as ``read_records``; a record without text; a second system message.
    """
    columns = [field.partition(".")[0]] if field else [MESSAGES, *FIELDS, *ANSWERS]
    for source in sources:
        for where, record in read_records(source, columns, split):
            if not is_record(source):
                found: str | Example = record["text"]
            else:
                found = _of_record(record, field, where, chat, whole)
            yield _in_chat(found, system, where) if chat else found


def reader_of(settings: Any) -> Callable[..., Iterator[str | Example]]:
    """``read_examples`` with the fields ``field``, ``split``, ``chat`` and ``system`` of some settings."""
    return partial(
        read_examples, field=settings.field, split=settings.split, chat=settings.chat, system=settings.system
    )  # fmt: skip


def _of_record(record: Any, field: str | None, where: str, chat: bool, whole: bool = False) -> str | Example:
    prompt = prompt_of(record, field, where)
    if not isinstance(prompt, str):
        last = prompt[-1]
        if last.get("role") == "assistant" and isinstance(last.get("content"), str):
            return Example(prompt[:-1], last["content"], where)
        return Example(prompt, None, where)
    named = next((name for name in FIELDS if name in record), "")
    answers = (record[name] for name in ANSWERS if isinstance(record.get(name), str))
    answer = next(answers, None) if field is None and named in ("prompt", "question") else None
    if answer is None:
        asked = whole and field is None and named in ("prompt", "question", "turns")
        return Example(prompt, None, where) if asked else prompt
    if named == "question" and not chat:
        return Example(f"Question: {prompt.strip()}\nAnswer:", f" {answer.strip()}", where)
    return Example(prompt, answer, where)


def _in_chat(found: str | Example, system: str | None, where: str) -> Example:
    example = Example(found, None, where) if isinstance(found, str) else found
    if not example.prompt:
        return example
    try:
        return Example([*conversation(example.prompt, system)], example.answer, where)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


class ExampleEncoder:
    """Turn examples into token ids.

    Args:
        models: the pair, for its tokenizer and context.
        new_tokens: tokens that are labelled after a prompt.
        original: whether the answers are needed: they are the only texts to label.
    """

    def __init__(self, models: LoadedPair, new_tokens: int, *, original: bool = False) -> None:
        self._models, self._new, self._original = models, new_tokens, original

    def __call__(self, example: Example) -> tuple[str, list[int], int]:
        """Reason to skip an example ("": none), its token ids, and the number of them that are the prompt.

        After an answer comes the end of the turn, again and again up to ``new_tokens`` (labelling leaves out what
        follows the first); without an answer the prompt is alone.

        Raises:
            UserError: messages that the chat template refuses, ids outside the vocabulary.
        """
        models, prompt = self._models, example.prompt
        said = prompt if isinstance(prompt, str) else "".join(str(message) for message in prompt)
        if not said.strip() or not prompt:
            return "empty", [], 0
        if len(said) > _CHARS_PER_TOKEN * models.context:
            return "too_long", [], 0
        try:
            encoded = encode_prompt(prompt, models)
        except UserError as error:
            raise UserError(f"{example.where}: {error}") from None
        ids = encoded.ids
        if len(ids) + self._new > models.context:
            return "too_long", ids, len(ids)
        answer = self._answer(example.answer, encoded.ends)
        return ("too_short" if self._original and not answer else ""), [*ids, *answer], len(ids)

    def _answer(self, text: str | None, turn: tuple[int, ...]) -> list[int]:
        models = self._models
        if not text or models.tokenizer is None:
            return []
        part = text[: _CHARS_PER_TOKEN * self._new]
        ids = text_ids(part, models, models.tokenizer, special=False)[: self._new]
        ends = [id for id in (*turn, *models.target.eos_ids) if id in models.target.eos_ids]
        if len(ids) < self._new:
            ids = [*ids, *ends[:1] * (self._new - len(ids))]
        return ids if len(ids) == self._new else []
