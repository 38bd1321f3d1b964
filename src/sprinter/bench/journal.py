"""Journal of a run: one line per answer, written immediately, so that an interrupted run can be resumed."""

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
    """Rows of a run, kept in memory only."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.done: set[Key] = set()

    def add(self, row: dict[str, Any]) -> None:
        """Store a row."""
        self.rows.append(row)
        self.done.add(key_of(row))

    def close(self) -> None:
        """Do nothing: no file is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Journal(Memory):
    """Directory of one run: ``run.json`` describes the run, ``rows.jsonl`` holds the rows so far.

    Args:
        directory: created if it does not exist.
        run: what the rows depend on (pair, suites, settings, machine), JSON values.
        arms: name -> spec. A later call may add arms, and only those are asked then; a name cannot have two specs.
        restart: delete the rows in the directory.

    Raises:
        UserError: the directory cannot be written, or holds another run.
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
                ):  # not a judge's replies: they cost money and are stored by question
                    (directory / name).unlink(missing_ok=True)
            known = self._check(run)
            self._same_specs(known, arms or {})
            self.rows = self._read()
            write_atomic(
                directory / RUN, json.dumps({**run, "arms": {**known, **(arms or {})}}, indent=1) + "\n"
            )
            # This drops a last line that was truncated when the run was killed.
            write_atomic(directory / ROWS, "".join(map(_line, self.rows)))
            self._file = open(directory / ROWS, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write to '{directory}' ({error.strerror}): free it or give another directory"
            ) from None

    def add(self, row: dict[str, Any]) -> None:
        """Store a row and flush it.

        Raises:
            UserError: the disk is full or cannot be written.
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
        except (ValueError, LookupError, TypeError):  # TypeError: a line is not an object
            raise UserError(
                f"'{self.directory / ROWS}' is damaged: give another directory, or --restart to start over"
            ) from None

    def _check(self, run: dict[str, Any]) -> dict[str, str]:
        """Return the arms of the run in the directory; raise a UserError if it is another run."""
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
                    "delete it and start over"
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
    """(arm, suite, temperature, sample, repeat), which identifies a row."""
    return row["model_id"], row["suite"], row["temperature"], row["question_id"], row["repeat"]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
