"""Read texts from files and data sets.

The name of a source decides how it is read:

* ``.txt``, ``.txt.gz``: if the first non-blank line begins with ``<doc ``, each ``<doc ...> ... </doc>`` block is one
  text (WikiExtractor's format); otherwise each non-blank line is one, or see ``SPLITS``.
* ``.jsonl``, ``.jsonl.gz``: one object per line; its text is in the field given, or in the first of ``FIELDS`` found.
* ``.parquet``: one row per record, with the same choice of column; needs pyarrow.
* any other name that is not a file: a name for the ``datasets`` package, ``name`` or ``name@split``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from sprinter.errors import UserError, first_line
from sprinter.parameters import Positive, checked, stated

__all__ = [
    "FIELDS", "MESSAGES", "SPLITS", "ReadingSettings", "SourceRecord", "is_record", "is_source", "prompt_of",
    "read_hub", "read_lines", "read_records", "survey", "text_of",
]  # fmt: skip

FIELDS = ("text", "prompt", "question", "turns", "content")
"""Fields that may hold the text of a record, in order of preference."""

MESSAGES = "messages"
"""Field that holds the messages of a conversation."""

SPLITS = ("lines", "blank-lines", "file")
"""Unit that is one text in a plain ``.txt`` file: a line, a paragraph between blank lines, or the whole file."""

SourceRecord = dict[str, Any]


@checked
class ReadingSettings:
    """How texts are read from files."""

    limit: Positive | None = stated(None, "Maximum number of texts. None: all.")
    field: str | None = stated(
        None, "Field of a record that holds its text; dots separate nested fields. "
        "None: text, prompt, question, turns or content.",
    )  # fmt: skip
    split: Literal["lines", "blank-lines", "file"] = stated(
        "lines", "What one text of a .txt file is: a line, a block between blank lines, the file."
    )
    chat: bool = stated(False, "Every text is a prompt of a user; prompts go through the chat template.")
    system: str | None = stated(None, "System message before all prompts, in chat form.")

    def __post_init__(self) -> None:
        if self.system is not None and not self.chat:
            raise UserError("system goes with chat: give chat=True too, or leave system out")


_KNOWN = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.\[\]:%+-]+)?")
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_MISSING = object()
_BLOCK = "<doc "


def survey(
    sources: Sequence[str], read: Callable[[Sequence[str]], Iterator[Any]], limit: int | None = None
) -> list[dict[str, Any]]:
    """Read all sources once, so that errors show before labelling begins.

    Args:
        sources: files or data set names.
        read: yields the texts and examples of sources (``training.examples``).
        limit: maximum number of texts to count over all sources; a source beyond it counts 0 texts.

    Returns:
        {"name", "sha256", "texts"} of each source, "texts" being the number of texts; "examples" where some are not
        text.

    Raises:
        UserError: a source is missing, empty, unreadable or not UTF-8.
    """
    found, left = [], limit
    for source in sources:
        digest, count, examples = hashlib.sha256(), 0, 0
        for text in islice(read([source]), left):
            count += 1
            examples += not isinstance(text, str)
            if not Path(source).is_file():
                digest.update(str(text).encode() + b"\0")
        if count == 0 and left != 0:
            raise UserError(f"'{source}' holds no text: give a file with at least one")
        if Path(source).is_file():
            with open(source, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        facts = {"name": source, "sha256": digest.hexdigest(), "texts": count}
        found.append(facts | ({"examples": examples} if examples else {}))
        left = None if left is None else left - count
    return found


def read_records(
    source: str, columns: Sequence[str] | None = None, split: str = "lines"
) -> Iterator[tuple[str, SourceRecord]]:
    """Yield (location, record); a line gives {"text"}, a block {"id", "title", ..., "text"}.

    Args:
        source: file or data set name.
        columns: columns of a Parquet file to read, missing ones excepted; None: all.
        split: unit of a plain text file, one of ``SPLITS``.

    Raises:
        UserError: the source is missing, unreadable, of an unknown kind or not UTF-8; names the line.
    """
    reader = _reader(source, split)
    try:
        yield from reader(source, columns)
    except (OSError, EOFError, zlib.error) as error:  # gzip raises any of these for a damaged file
        raise UserError(f"cannot read '{source}' ({error}): check the file") from None


def is_source(name: str) -> bool:
    """Whether the name has a suffix of a file format that can be read."""
    return name.endswith(_KNOWN)


def read_hub(
    name: str, split: str = "train", *, config: str | None = None, data_files: str | None = None
) -> Iterator[tuple[str, SourceRecord]]:
    """Stream the records of a data set through the ``datasets`` package.

    Args:
        name: hub id, or a file format ("json") of that package.
        split: split of the data set.
        config: configuration of the data set, if it has several.
        data_files: URL or pattern of the files to read.

    Yields:
        (location, record).

    Raises:
        UserError: the package is missing, or the data set cannot be loaded.
    """
    shown = (
        data_files if data_files and "://" in data_files else f"{name}@{split}" if split != "train" else name
    )
    datasets = _optional("datasets", "datasets", f"reading the data set '{shown}'")
    options = {key: value for key, value in (("name", config), ("data_files", data_files)) if value}
    try:
        rows = datasets.load_dataset(name, split=split, streaming=True, **options)
        for number, record in enumerate(rows):
            yield f"row {number} of data set '{shown}'", record
    except Exception as error:  # the package raises errors of its own, and network errors
        raise UserError(
            f"cannot load data set '{shown}' ({first_line(error)}): check its name, split and the network"
        ) from None


def read_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield number (from 1) and text of each line, without the line break.

    Raises:
        UserError: the file is not UTF-8; names the line.
    """
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


def text_of(record: Any, field: str | None, where: str) -> str:
    """Text of a record; if the field holds a list (turns of a conversation), its first entry.

    Raises:
        UserError: the record is not an object, lacks the field, or the field is not text.
    """
    if not isinstance(record, dict):
        raise UserError(f'{where} is not an object with fields: give records such as {{"text": ...}}')
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
        raise UserError(f"field '{'.'.join(path)}' of {where} is not text: name another with --field")
    return value


def prompt_of(record: Any, field: str | None, where: str) -> str | list[dict[str, Any]]:
    """The prompt of a record: its messages (field "messages", or the field given, if it lists them), else its text.

    Raises:
        UserError: as ``text_of``; an empty list of messages.
    """
    value: Any = record
    for name in (field or MESSAGES).split("."):
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return value
    if field in (None, MESSAGES) and value is not _MISSING:
        raise UserError(
            f"field '{MESSAGES}' of {where} is not a list of messages: give "
            '[{"role": "user", "content": "..."}, ...]'
        )
    return text_of(record, field, where)


def is_plain(source: str) -> bool:
    """Whether the source is a plain text file, to which ``split`` applies."""
    if is_record(source) or not Path(source).is_file():
        return False
    first = next((line for _, line in read_lines(source) if line.strip()), "")
    return not first.startswith(_BLOCK)


Reader = Callable[[str, Sequence[str] | None], Iterator[tuple[str, SourceRecord]]]


def _reader(source: str, split: str) -> Reader:
    path = Path(source)
    kind = next((known for known in _KNOWN if path.name.endswith(known)), None)
    if source and path.is_dir():
        raise UserError(f"'{source}' is a directory: give its files")
    if path.is_file():
        if kind is None:
            raise UserError(f"'{source}' is of no known kind: give one that ends in {', '.join(_KNOWN)}")
        readers: dict[str, Reader] = {".txt": partial(_from_text, split), ".jsonl": _from_json_lines}
        return readers.get(kind.removesuffix(".gz"), _from_parquet)
    if kind is not None or not _HUB_NAME.fullmatch(source):
        raise UserError(f"there is no file '{source}': check the path")
    return _from_datasets


def is_record(source: str) -> bool:
    """Whether the source holds records with fields, not plain text or ``<doc>`` blocks."""
    return not source.removesuffix(".gz").endswith(".txt")


def _from_text(split: str, source: str, columns: Sequence[str] | None) -> Iterator[tuple[str, SourceRecord]]:
    if not is_plain(source):
        yield from _blocks(source)
        return
    began, lines = 0, list[str]()
    for number, line in read_lines(source):
        if line.strip():
            began = began if lines else number
            lines.append(line)
        elif lines and split == "file":
            lines.append(line)
        if lines and (split == "lines" or (split == "blank-lines" and not line.strip())):
            yield f"line {began} of '{source}'", {"text": "\n".join(lines)}
            lines = []
    if lines:
        yield f"line {began} of '{source}'", {"text": "\n".join(lines).rstrip("\n")}


def _blocks(source: str) -> Iterator[tuple[str, SourceRecord]]:
    """Yield the contents of ``<doc ...> ... </doc>`` blocks; text between blocks is left out."""
    block: list[str] | None = None
    where, record = "", {}
    for number, line in read_lines(source):
        if line.startswith(_BLOCK):
            block, where, record = [], f"line {number} of '{source}'", dict(_ATTRIBUTE.findall(line))
        elif line.startswith("</doc>") and block is not None:
            yield where, {**record, "text": "\n".join(block).strip()}
            block = None
        elif block is not None:
            block.append(line)
    if block is not None:
        raise UserError(f"'{source}' ends within a <doc> block: the file is truncated, fetch it again")


def _from_json_lines(source: str, columns: Sequence[str] | None) -> Iterator[tuple[str, SourceRecord]]:
    for number, line in read_lines(source):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"line {number} of '{source}' is not JSON ({error}): fix or delete it") from None
        yield f"line {number} of '{source}'", record


def _from_parquet(source: str, columns: Sequence[str] | None) -> Iterator[tuple[str, SourceRecord]]:
    parquet = _optional("pyarrow.parquet", "pyarrow", f"reading '{source}'")
    try:
        table = parquet.ParquetFile(source)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise UserError(f"cannot read '{source}' ({error}): give a Parquet file") from None
    names = list(table.schema_arrow.names)
    # if none of them exists, read all: the error message then lists the existing ones
    wanted = names if columns is None else [name for name in columns if name in names] or names
    with table:
        for batch in table.iter_batches(batch_size=256, columns=wanted):
            for record in batch.to_pylist():
                yield f"a row of '{source}'", record


def _from_datasets(source: str, columns: Sequence[str] | None) -> Iterator[tuple[str, SourceRecord]]:
    _optional("datasets", "datasets", f"there is no file '{source}'; reading it as a data set's name")
    name, _, split = source.partition("@")
    yield from read_hub(name, split or "train")


def _optional(module: str, package: str, what: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise UserError(f"{what} needs the package {package}: pip install {package}") from None


def _no_field(where: str, names: list[str], field: str | None) -> UserError:
    wanted = f"field '{field}'" if field else f"none of the fields {', '.join(FIELDS)}"
    return UserError(
        f"{where} has {'no ' if field else ''}{wanted}, only {', '.join(map(str, names)) or 'nothing'}: "
        "name the text's field with --field"
    )
