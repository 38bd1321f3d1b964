"""Reads the texts of ``sprinter doctor --probe``: plain lines, prompts with answers, conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.models.pair import LoadedPair
    from sprinter.theory.recording import Passage

__all__ = ["TEXTS", "ProbeTexts", "read_probe"]

TEXTS = 32
"""At most this number of texts of a file is read."""
_FORMS = '{"text": ...}, {"prompt": ..., "answer": ...} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class ProbeTexts:
    """What is read of a file.

    Attributes:
        passages: prompts and the tokens that are probed. texts: number of texts in the file.
        tokens: number of tokens after prompts in the texts that are read; ``passages`` may hold fewer of them.
    """

    passages: list[Passage]
    texts: int
    tokens: int

    @property
    def positions(self) -> int:
        """Number of probed tokens."""
        return sum(len(passage.ids) for passage in self.passages)


def read_probe(file: Path, pair: LoadedPair, positions: int) -> ProbeTexts:
    """Read the first ``TEXTS`` texts, and of each the beginning, so that ``positions`` tokens are probed in all.

    A line of text is probed from its second token on; of a record, the answer is probed after the prompt. Prompts are
    given in the chat form of the tokenizer, if it has one.

    Raises:
        UserError: no file, no texts, a text that is too short or longer than the context, a record of another form.
    """
    from sprinter.theory.recording import Passage
    from sprinter.training.sources import read_records

    if not file.is_file():
        raise UserError(f"there is no file '{file}': give texts, one a line (.txt), or records (.jsonl)")
    if pair.tokenizer is None:
        raise UserError("a probe reads text and this pair has no tokenizer: give one with --tokenizer")
    found, texts = [], 0
    records = read_records(str(file))
    for where, record in islice(records, TEXTS):
        found.append(_ids(record, where, pair))
        texts += 1
    texts += sum(1 for _ in records)
    if not found:
        raise UserError(f"'{file}' holds no text: give at least one")
    most = _share([len(ids) for _, ids in found], positions)
    passages = [Passage(tuple(prompt), tuple(ids[:most])) for prompt, ids in found]
    return ProbeTexts(passages, texts, sum(len(ids) for _, ids in found))


def _share(lengths: Sequence[int], total: int) -> int:
    """The largest limit, the same for each text, under which ``total`` tokens are read; at least 1."""
    fit = (most for most in range(max(lengths), 0, -1) if sum(min(n, most) for n in lengths) <= total)
    return next(fit, 1)


def _ids(record: Any, where: str, pair: LoadedPair) -> tuple[list[int], list[int]]:
    """Token ids of a record's prompt, and of what is probed after it."""
    from sprinter.engine.chat import render_chat
    from sprinter.engine.tokens import encoded

    prompt, answer = _parts(record, where)
    assert pair.tokenizer is not None
    ids = encoded(pair.tokenizer, answer, special=prompt is None)
    if prompt is None:
        before, ids = ids[:1], ids[1:]
    elif pair.tokenizer.chat_template is None and isinstance(prompt, str):
        before = encoded(pair.tokenizer, prompt)
    else:
        talk = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            before = render_chat(talk, pair).ids
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not ids or not before:
        raise UserError(f"{where} is too short: a probe needs a token after the first, or after the prompt")
    if (length := len(before) + len(ids)) > pair.context:
        raise UserError(
            f"{where} has {length} tokens, more than the context of the pair, {pair.context} tokens: shorten it"
        )
    return before, ids


def _parts(record: Any, where: str) -> tuple[str | Sequence[Mapping[str, Any]] | None, str]:
    """Prompt (None: a plain text) and answer of a record."""
    given = record if isinstance(record, dict) else {}
    prompt: Any = given.get("prompt", given.get("question"))
    answer: Any = given.get("answer") if prompt is not None else given.get("text")
    if "messages" in given:
        messages = given["messages"]
        last = messages[-1] if isinstance(messages, list) and len(messages) > 1 else None
        if not isinstance(last, dict) or last.get("role") != "assistant":
            raise UserError(f"{where}: its messages do not end with an assistant's answer to probe: add it")
        prompt, answer = messages[:-1], last.get("content")
    if not isinstance(answer, str) or not isinstance(prompt, str | list | None):
        raise UserError(f"{where} is of no known form: give {_FORMS}")
    return prompt, answer
