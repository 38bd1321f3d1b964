"""The journal of a run: one line an answer, written at once, so that a run goes on where it was ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from sprinter.errors import UserError
from sprinter.files import read_json_lines, write_atomic

__all__ = ["QUALITY", "ROWS", "RUN", "Journal", "Memory", "key_of"]

RUN, ROWS, QUALITY = "run.json", "rows.jsonl", "quality.jsonl"


class Memory:
    """Rows of a run that is kept in memory alone."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.done: set[Key] = set()

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.rows.append(row)
        self.done.add(key_of(row))

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Journal(Memory):
    """The directory of one run: ``run.json`` says what it is, ``rows.jsonl`` holds the rows so far.

    Args:
        directory: made if it is not there.
        run: what the rows depend on (pair, suites, settings, machine), JSON values.
        arms: name -> spec. A later call may have others, and with more arms asks only those; one name cannot stand for
            two specs.
        restart: throw away what is there.

    Raises:
        UserError: it cannot be written, or holds another run.
    """

    def __init__(
        self,
        directory: Path,
        run: dict[str, Any],
        *,
        arms: Mapping[str, str] | None = None,
        restart: bool = False,
    ) -> None:
        super().__init__()
        self.directory = directory
        if directory.exists() and not directory.is_dir():
            raise UserError(f"'{directory}' is a file: give a directory for the results")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if restart:
                for name in (
                    ROWS,
                    RUN,
                    QUALITY,
                ):  # a judge's replies are kept: they cost money and know their question
                    (directory / name).unlink(missing_ok=True)
            known = self._check(run)
            self._same_specs(known, arms or {})
            self.rows = self._read()
            write_atomic(
                directory / RUN, json.dumps({**run, "arms": {**known, **(arms or {})}}, indent=1) + "\n"
            )
            # A line that was cut when the run was killed is dropped for good.
            write_atomic(directory / ROWS, "".join(map(_line, self.rows)))
            self._file = open(directory / ROWS, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write to '{directory}' ({error.strerror}): free it or give another directory"
            ) from None

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row.

        Raises:
            UserError: the disk is full, or will not be written.
        """
        try:
            self._file.write(_line(row))
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"cannot write to '{self.directory / ROWS}' ({error.strerror}): free some space and run the same "
                f"command again ({len(self.rows)} answers are kept)"
            ) from None
        super().add(row)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def _read(self) -> list[dict[str, Any]]:
        try:
            rows = read_json_lines(self.directory / ROWS)
            self.done.update(map(key_of, rows))
            return rows
        except (ValueError, LookupError, TypeError):  # TypeError: a line that is no object
            raise UserError(
                f"'{self.directory / ROWS}' is damaged: give another directory, or --restart to begin anew"
            ) from None

    def _check(self, run: dict[str, Any]) -> dict[str, str]:
        """Refuse another run; the arms of the one that is there."""
        path = self.directory / RUN
        if not path.is_file():
            if (self.directory / ROWS).exists():
                raise UserError(f"'{self.directory}' holds {ROWS} and no {RUN}: give another directory")
            return {}
        try:
            there = dict(json.loads(path.read_text(encoding="utf-8")))
            arms = dict(there.get("arms", {}))
        except (ValueError, TypeError):
            raise UserError(f"'{path}' is damaged: give another directory, or --restart") from None
        for name, value in json.loads(json.dumps(run)).items():
            if there.get(name) != value:
                raise UserError(
                    f"'{self.directory}' holds a run with another {name}: give another directory, or --restart to "
                    "delete it and begin anew"
                )
        return arms

    def _same_specs(self, known: Mapping[str, str], arms: Mapping[str, str]) -> None:
        for name, spec in arms.items():
            if known.get(name, spec) != spec:
                raise UserError(
                    f"'{self.directory}' holds answers of another arm called '{name}' ({known[name]}, now {spec}): "
                    "give it another name (SPEC as NAME) or another directory"
                )


Key = tuple[str, str, float, str, int]


def key_of(row: dict[str, Any]) -> Key:
    """(arm, suite, temperature, sample, repeat): what makes a row one of its kind."""
    return row["model_id"], row["suite"], row["temperature"], row["question_id"], row["repeat"]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
