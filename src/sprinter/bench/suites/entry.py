"""Definition of a suite: sources of records, and a function that makes samples of them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sprinter.bench.sample import Sample
from sprinter.bench.suites.rule import TextRule
from sprinter.errors import UserError
from sprinter.training.sources import SourceRecord, read_hub, read_records

__all__ = ["Entry", "Hub", "Making", "Reading", "SuiteRows", "SuiteSource"]

SuiteRows = Iterator[tuple[str, SourceRecord]]
"""(location of a record as text, record)."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set on the hub, used without ``--data``.

    Attributes:
        name: hub id, or "json" with ``data_files``.
        split: split of the data set.
        config: configuration of the data set, if it has several.
        data_files: URL or pattern of the files to read.
        text: field that holds the text, if it is not called "text".
        most: maximum number of records to read; 0: all.
        keep: predicate for the records to use.
    """

    name: str
    split: str = "train"
    config: str | None = None
    data_files: str | None = None
    text: str = ""
    most: int = 0
    keep: Callable[[SourceRecord], bool] = lambda record: True

    def read(self) -> SuiteRows:
        """Yield the records to use, in order."""
        rows = read_hub(self.name, self.split, config=self.config, data_files=self.data_files)
        kept = ((where, self._renamed(record)) for where, record in rows if self.keep(record))
        return islice(kept, self.most) if self.most else kept

    def _renamed(self, record: SourceRecord) -> SourceRecord:
        return {**record, "text": record.get(self.text)} if self.text else record

    def __str__(self) -> str:
        return f"{self.data_files or self.name}@{self.split}"


@dataclass(frozen=True, slots=True)
class SuiteSource:
    """One part of a suite's data (questions, references, ...).

    Attributes:
        files: names of its files under ``--data``, read in this order; all must exist.
        hub: the data set that is read without ``--data``.
        read: reads the records of one file.
    """

    files: tuple[str, ...] = ()
    hub: Hub | None = None
    read: Callable[[str], SuiteRows] = read_records


class Reading:
    """A source that is being read, with hashes of what was read.

    Args:
        source: source to read.
        data: directory of its files; None: read from the hub.
    """

    def __init__(self, source: SuiteSource, data: Path | None) -> None:
        self._source = source
        self._hub = source.hub if data is None or not source.files else None
        self._paths = [data / name for name in source.files] if data else []
        self._digest = hashlib.sha256()

    def rows(self) -> SuiteRows:
        """Yield the records.

        Raises:
            UserError: a file or data set is missing or cannot be read, or a record is not an object with fields.
        """
        for where, record in self._from_files() if self._hub is None else self._from_hub(self._hub):
            if not isinstance(record, dict):
                raise UserError(f'{where} is not an object with fields: give records such as {{"text": ...}}')
            yield where, record

    def _from_files(self) -> SuiteRows:
        if not self._paths:
            raise UserError(f"this suite is read from files alone: {self._hint}")
        for path in self._paths:
            yield from self._source.read(str(path))

    def _from_hub(self, hub: Hub) -> SuiteRows:
        try:
            for where, record in hub.read():
                self._digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
                yield where, record
        except UserError as error:
            raise UserError(f"{error}, or {self._hint}") from None

    @property
    def _hint(self) -> str:
        names = ", ".join(self._source.files)
        return f"give --data, the directory that holds {names}" if names else "give a file"

    def facts(self) -> list[dict[str, str]]:
        """Name and sha256 of each file, or of the records read from the hub."""
        if self._hub is not None:
            return [{"name": str(self._hub), "sha256": self._digest.hexdigest()}]
        found = []
        for path in self._paths:
            with path.open("rb") as file:
                found.append({"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()})
        return found


@dataclass(slots=True)
class Making:
    """Parameters for making samples, and the number of texts that were skipped.

    Attributes:
        name: name of the suite.
        rule: rule for running text.
        tokenizer: the pair's tokenizer, for rules that count tokens.
        text_field: field of the records that holds the text, if the user named it.
        chat: whether prompts are asked in chat form.
        skipped: number of texts that gave no sample, by reason.
    """

    name: str
    rule: TextRule
    tokenizer: PreTrainedTokenizerBase | None = None
    text_field: str | None = None
    chat: bool = False
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Entry:
    """Definition of a suite.

    Attributes:
        about: one-line description.
        sources: parts of its data.
        make: function from one iterator of records per source to samples.
        new_tokens: default limit of new tokens per turn; 0: up to the context limit.
        rule: for running text the rule that splits it; otherwise a description of how prompts are made.
        grouped: whether samples of all groups are asked in turn, so that the first N are spread evenly.
        group: function from a category to its group.
        chat: whether prompts are messages of a user, not text to be continued.
        chat_rule: for prompts that are others in chat form, how they are made there.
    """

    about: str
    sources: tuple[SuiteSource, ...]
    make: Callable[[list[SuiteRows], Making], Iterable[Sample]]
    new_tokens: int
    rule: TextRule | str
    grouped: bool = False
    group: Callable[[str], str] = str
    chat: bool = False
    chat_rule: str = ""
