"""What a suite is made of: sources of records, and a function that makes samples of them."""

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

__all__ = ["Entry", "Files", "Hub", "Making", "Reading", "SuiteRows", "SuiteSource"]

SuiteRows = Iterator[tuple[str, SourceRecord]]
"""Where a record stands, in words, and the record."""


@dataclass(frozen=True, slots=True)
class Files:
    """Files under ``--data``.

    Attributes:
        names: read one after another; all must be there.
        read: gives the records of one file.
    """

    names: tuple[str, ...]
    read: Callable[[str], SuiteRows] = read_records


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set for those who give no ``--data``.

    Attributes:
        name: hub id, or "json" with ``data_files``.
        split: of the data set.
        config: its configuration, where it has several.
        data_files: address or pattern of the files to read.
        text: field that holds the text, where it is not called "text".
        most: records to read; 0: all.
        keep: which records count.
    """

    name: str
    split: str = "train"
    config: str | None = None
    data_files: str | None = None
    text: str = ""
    most: int = 0
    keep: Callable[[SourceRecord], bool] = lambda record: True

    def read(self) -> SuiteRows:
        """The records that count, in order."""
        rows = read_hub(self.name, self.split, config=self.config, data_files=self.data_files)
        kept = ((where, self._renamed(record)) for where, record in rows if self.keep(record))
        return islice(kept, self.most) if self.most else kept

    def _renamed(self, record: SourceRecord) -> SourceRecord:
        return {**record, "text": record.get(self.text)} if self.text else record

    def __str__(self) -> str:
        return f"{self.data_files or self.name}@{self.split}"


@dataclass(frozen=True, slots=True)
class SuiteSource:
    """One part of a suite's data (questions, references, ...), as files or, where there is a network, from the hub."""

    files: Files | None
    hub: Hub | None = None

    def missing(self, data: Path) -> list[str]:
        """Its files that are not in ``data``."""
        return [name for name in self.files.names if not (data / name).is_file()] if self.files else []


class Reading:
    """A source while it is read.

    Args:
        source: what to read.
        data: directory of its files; None: from the hub.
    """

    def __init__(self, source: SuiteSource, data: Path | None) -> None:
        self._files = source.files
        self._hub = source.hub if data is None or source.files is None else None
        self._paths = [data / name for name in source.files.names] if data and source.files else []
        self._digest = hashlib.sha256()

    def rows(self) -> SuiteRows:
        """The records.

        Raises:
            UserError: a file or data set is missing or cannot be read, or a record is no object with fields.
        """
        for where, record in self._from_files() if self._hub is None else self._from_hub(self._hub):
            if not isinstance(record, dict):
                raise UserError(f'{where} is no object with fields: give records such as {{"text": ...}}')
            yield where, record

    def _from_files(self) -> SuiteRows:
        if self._files is None or not self._paths:
            raise UserError(f"this suite is read from files alone: {self._mend}")
        for path in self._paths:
            yield from self._files.read(str(path))

    def _from_hub(self, hub: Hub) -> SuiteRows:
        try:
            for where, record in hub.read():
                self._digest.update(json.dumps(record, sort_keys=True, default=str).encode() + b"\n")
                yield where, record
        except UserError as error:
            raise UserError(f"{error}, or {self._mend}") from None

    @property
    def _mend(self) -> str:
        return f"give --data with {', '.join(self._files.names)}" if self._files else "give a file"

    def facts(self) -> list[dict[str, str]]:
        """Name and sha256 of each file, or of the records that were read from the hub."""
        if self._hub is not None:
            return [{"name": str(self._hub), "sha256": self._digest.hexdigest()}]
        found = []
        for path in self._paths:
            with path.open("rb") as file:
                found.append({"name": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()})
        return found


@dataclass(slots=True)
class Making:
    """What samples are made with, and what was passed over.

    Attributes:
        name: of the suite.
        rule: for running text.
        tokenizer: the pair's, for rules that count tokens.
        text_field: of the records, where the user named it.
        skipped: texts that gave no sample, by reason.
    """

    name: str
    rule: TextRule
    tokenizer: PreTrainedTokenizerBase | None = None
    text_field: str | None = None
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Entry:
    """A suite as a list knows it.

    Attributes:
        about: one line.
        sources: the parts of its data.
        make: from one iterator of records a source to samples.
        new_tokens: usual limit of new tokens a turn; 0: up to the context limit.
        rule: for running text how it is cut; else, in words, how prompts are made.
        grouped: samples are asked one a group in turn, so that the first N are spread evenly.
        group: from a category to its group.
        chat: prompts are what a user says, and not text to go on from.
    """

    about: str
    sources: tuple[SuiteSource, ...]
    make: Callable[[list[SuiteRows], Making], Iterable[Sample]]
    new_tokens: int
    rule: TextRule | str
    grouped: bool = False
    group: Callable[[str], str] = str
    chat: bool = False
