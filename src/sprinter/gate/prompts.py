"""Prompts: texts from files or data sets, one after another, and the rule that cuts them.

Sources, by their names:

* ``.txt``, ``.txt.gz``: if the first line that is not blank begins with ``<doc ``, each ``<doc ...> ... </doc>`` block
  is one text (WikiExtractor's format); else each line that is not blank is one.
* ``.jsonl``, ``.jsonl.gz``: one object a line; its text is in ``FIELDS`` (the first that is there) or where told.
* ``.parquet``: likewise, by column; needs pyarrow.
* anything else that is no file: a name for the ``datasets`` package, ``name`` or ``name@split``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sprinter.errors import UserError

__all__ = ["FIELDS", "Cut", "Prompt", "PromptRule", "read_texts", "survey"]

FIELDS = ("text", "prompt", "question", "turns", "content")
"""Where the text of a record is looked for."""

_KNOWN = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.\[\]:%+-]+)?")
_CHARS_PER_TOKEN = 32  # hardly any text has more; encoding megabytes takes long


@dataclass(frozen=True, slots=True)
class Prompt:
    """The beginning of a text, and what really follows.

    Attributes:
        index: number of the text in the input.
        ids: token ids of the prompt, at least one.
        original: the ``new_tokens`` ids that follow in the text.
    """

    index: int
    ids: tuple[int, ...]
    original: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptRule:
    """The prompt is the first share of a text's words, at most so many tokens (SPRINTER: the first 30 %).

    Args:
        share: of the words, at least one word.
        prompt_tokens: longer prompts are cut to so many; 0: no cut.
        new_tokens: tokens that must follow in the text, so that all prefix classes have the same prompts.
        context: a prompt and its new tokens must fit in so many.
    """

    share: float
    prompt_tokens: int
    new_tokens: int
    context: int


class Cut:
    """Texts in, prompts out; counts what it passes over.

    Attributes:
        skipped: texts that gave no prompt, by reason: "too_long" (beyond the context), "too_short" (fewer than
            ``new_tokens`` tokens after the prompt), "empty" (a record without text).
        texts: texts seen.
    """

    def __init__(self, rule: PromptRule, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        self._rule, self._tokenizer, self._vocab = rule, tokenizer, vocab_size
        self.skipped = {"too_long": 0, "too_short": 0, "empty": 0}
        self.texts = 0

    def __call__(self, texts: Iterable[str]) -> Iterator[Prompt]:
        """The prompts of the texts that can be used, in order."""
        for index, text in enumerate(texts):
            self.texts = index + 1
            reason, ids, length = self._cut(text)
            if reason:
                self.skipped[reason] += 1
            else:
                original = ids[length : length + self._rule.new_tokens]
                yield Prompt(index, tuple(ids[:length]), tuple(original))

    def _cut(self, text: str) -> tuple[str, list[int], int]:
        """Why the text cannot be used ("" if it can), its first token ids, and how many of them are the prompt."""
        rule = self._rule
        words = len(text.split())
        if not words:
            return "empty", [], 0
        most = rule.prompt_tokens or rule.context
        count = min(max(1, int(rule.share * words)), most)
        # A word has at least one token: nothing beyond these words can matter.
        ends = [match.end() for match in islice(re.finditer(r"\S+", text), count + rule.new_tokens)]
        end, stop = ends[count - 1], ends[-1]
        room = _CHARS_PER_TOKEN * (most + rule.new_tokens)
        ids = self._encode(text[: min(stop, room)])
        length = most if count == most else min(len(self._encode(text[: min(end, room)])), most)
        if length + rule.new_tokens > rule.context:
            return "too_long", ids, length
        if length < 1 or len(ids) < length + rule.new_tokens:
            return "too_short", ids, length
        if max(ids) >= self._vocab:
            raise UserError(
                f"the tokenizer gives token id {max(ids)}, the pair's common vocabulary has {self._vocab} tokens: "
                "give the tokenizer that both models were trained with"
            )
        return "", ids, length

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])


def survey(
    sources: Sequence[str], field: str | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """Read all sources once: name, sha256 and number of texts of each, so that mistakes show before the work begins.

    Args:
        sources: files or data set names.
        field: of records, see ``read_texts``.
        limit: most texts to count, over all sources; a source beyond it counts 0 texts.

    Raises:
        UserError: missing, empty, unreadable or not UTF-8.
    """
    found, left = [], limit
    for source in sources:
        digest, count = hashlib.sha256(), 0
        for text in islice(read_texts([source], field), left):
            count += 1
            if not Path(source).is_file():
                digest.update(text.encode() + b"\0")
        if count == 0 and left != 0:
            raise UserError(f"'{source}' holds no text: give a file with at least one")
        if Path(source).is_file():
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        found.append({"name": source, "sha256": digest.hexdigest(), "texts": count})
        left = None if left is None else left - count
    return found


def read_texts(sources: Sequence[str], field: str | None = None) -> Iterator[str]:
    """The texts of all sources in order; "" for a record whose text is empty.

    Args:
        sources: files or data set names.
        field: of records: a field's name, dots lead into objects; None takes the first of ``FIELDS`` that is there.

    Raises:
        UserError: missing, unreadable, of an unknown kind, not UTF-8; names the line.
    """
    for source in sources:
        reader = _reader(source)
        try:
            yield from reader(source, field)
        except (
            OSError,
            EOFError,
        ) as error:  # gzip tells a damaged file by an OSError, a cut one by an EOFError
            raise UserError(f"cannot read '{source}' ({error}): check the file") from None


Reader = Callable[[str, str | None], Iterator[str]]


def _reader(source: str) -> Reader:
    path = Path(source)
    kind = next((known for known in _KNOWN if path.name.endswith(known)), None)
    if source and path.is_dir():
        raise UserError(f"'{source}' is a directory: give its files")
    if path.is_file():
        if kind is None:
            raise UserError(f"'{source}' is of no known kind: give one that ends in {', '.join(_KNOWN)}")
        return {".txt": _from_text, ".jsonl": _from_json_lines}.get(kind.removesuffix(".gz"), _from_parquet)
    if kind is not None or not _HUB_NAME.fullmatch(source):
        raise UserError(f"there is no file '{source}': check the path")
    return _from_datasets


def _lines(source: str) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line, without its break."""
    opener: Any = gzip.open if source.endswith(".gz") else open
    with opener(source, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"'{source}' is not valid UTF-8 (byte 0x{line[error.start]:02x} in line {number}): "
                    "convert it to UTF-8"
                ) from None


def _from_text(source: str, field: str | None) -> Iterator[str]:
    lines = ((number, line) for number, line in _lines(source) if line.strip())
    first = next(lines, None)
    if first is None:
        return
    if first[1].startswith("<doc "):
        yield from _blocks(source)
        return
    yield first[1]
    for _, line in lines:
        yield line


def _blocks(source: str) -> Iterator[str]:
    """The contents of ``<doc ...> ... </doc>`` blocks; what stands between blocks is left out."""
    block: list[str] | None = None
    for _, line in _lines(source):
        if line.startswith("<doc "):
            block = []
        elif line.startswith("</doc>") and block is not None:
            yield "\n".join(block).strip()
            block = None
        elif block is not None:
            block.append(line)
    if block is not None:
        raise UserError(f"'{source}' ends within a <doc> block: the file is cut, fetch it again")


def _from_json_lines(source: str, field: str | None) -> Iterator[str]:
    for number, line in _lines(source):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of '{source}' is not JSON ({error}): mend or delete it") from None
        yield _text_of(record, field, f"line {number} of '{source}'")


def _from_parquet(source: str, field: str | None) -> Iterator[str]:
    parquet = _optional("pyarrow.parquet", "pyarrow", f"reading '{source}'")
    try:
        table = parquet.ParquetFile(source)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"cannot read '{source}' ({error}): give a Parquet file") from None
    names = (
        [field.partition(".")[0]]
        if field
        else [name for name in FIELDS if name in table.schema_arrow.names][:1]
    )
    if not set(names) & set(table.schema_arrow.names):
        raise _no_field(f"'{source}'", list(table.schema_arrow.names), field)
    with table:
        for batch in table.iter_batches(batch_size=256, columns=names):
            for record in batch.to_pylist():
                yield _text_of(record, field, f"a row of '{source}'")


def _from_datasets(source: str, field: str | None) -> Iterator[str]:
    name, _, split = source.partition("@")
    datasets = _optional(
        "datasets", "datasets", f"there is no file '{source}'; reading it as a data set's name"
    )
    try:
        rows = datasets.load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the package has its own errors, and the network's
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"cannot load data set '{source}' ({first}): check its name, split and the network"
        ) from None
    for number, record in enumerate(rows):
        yield _text_of(record, field, f"row {number} of data set '{source}'")


def _optional(module: str, package: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{what} needs the package {package}: pip install {package}") from None


def _text_of(record: Any, field: str | None, where: str) -> str:
    """The text of a record; of a list (the turns of a talk) the first entry."""
    if not isinstance(record, dict):
        raise UserError(f'{where} is no object with fields: give records such as {{"text": ...}}')
    path = field.split(".") if field else [name for name in FIELDS if name in record][:1]
    value: Any = record
    for name in path:
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    if not path or value is _MISSING:
        raise _no_field(where, list(record), field)
    if isinstance(value, list):
        value = value[0] if value else ""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"field '{'.'.join(path)}' of {where} is no text: name another with --field")
    return value


_MISSING = object()


def _no_field(where: str, names: list[str], field: str | None) -> UserError:
    wanted = f"field '{field}'" if field else f"none of the fields {', '.join(FIELDS)}"
    return UserError(
        f"{where} has {'no ' if field else ''}{wanted}, only {', '.join(map(str, names)) or 'nothing'}: "
        "name the text's field with --field"
    )
