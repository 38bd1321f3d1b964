"""Journal of a run: one line per answer, written immediately, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sprinter.errors import UserError
from sprinter.files import read_json_lines, write_atomic

__all__ = ["QUALITY", "ROWS", "RUN", "Journal", "Memory", "key_of", "recorded_costs"]

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
        costs: of passes, which the specs depend on; see ``recorded_costs``.
        session: how and where this call asks (command, environment); ``run.json`` lists the sessions of a run, so that
            one that was resumed elsewhere, by another command or commit, can be told from one that was not.
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
        costs: Mapping[str, Any] | None = None,
        session: Mapping[str, Any] | None = None,
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
            there = self._check(run)
            known = dict(there.get("arms", {}))
            self._same_specs(known, arms or {})
            self.rows = self._read()
            self.run_id = str(there.get("id") or _new_id(session or {}))
            self.sessions = [*there.get("sessions", []), *([dict(session)] if session else [])]
            self._facts = {"id": self.run_id, **run, "arms": {**known, **(arms or {})}}
            self._facts["costs"] = {**there.get("costs", {}), **(costs or {})}
            self._write_run()
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

    def end_session(self, facts: Mapping[str, Any]) -> None:
        """Store what is known at the end of this session (the load, the time).

        Raises:
            UserError: the file cannot be written.
        """
        self.sessions[-1].update(facts)
        try:
            self._write_run()
        except OSError as error:
            raise UserError(
                f"cannot write '{self.directory / RUN}' ({error.strerror}): free some space and run it again"
            ) from None

    def _write_run(self) -> None:
        write_atomic(
            self.directory / RUN, json.dumps({**self._facts, "sessions": self.sessions}, indent=1) + "\n"
        )

    def _read(self) -> list[dict[str, Any]]:
        try:
            rows = read_json_lines(self.directory / ROWS)
            self.done.update(map(key_of, rows))
            return rows
        except (ValueError, LookupError, TypeError):  # TypeError: a line is not an object
            raise UserError(
                f"'{self.directory / ROWS}' is damaged: give another directory, or --restart to start over"
            ) from None

    def _check(self, run: dict[str, Any]) -> dict[str, Any]:
        """Return ``run.json`` of the directory; raise a UserError if it is another run."""
        path = self.directory / RUN
        if not path.is_file():
            if (self.directory / ROWS).exists():
                raise UserError(f"'{self.directory}' holds {ROWS} and no {RUN}: give another directory")
            return {}
        try:
            there = dict(json.loads(path.read_text(encoding="utf-8")))
            dict(there.get("arms", {})), dict(there.get("costs", {}))
        except (ValueError, TypeError):
            raise UserError(f"'{path}' is damaged: give another directory, or --restart") from None
        for name, value in json.loads(json.dumps(run)).items():
            if there.get(name) != value:
                raise UserError(
                    f"'{self.directory}' holds a run with another {name}: give another directory, or --restart to "
                    "delete it and start over"
                )
        return there

    def _same_specs(self, known: Mapping[str, str], arms: Mapping[str, str]) -> None:
        for name, spec in arms.items():
            if known.get(name, spec) != spec:
                raise UserError(
                    f"'{self.directory}' holds answers of another arm called '{name}' ({known[name]}, now {spec}): "
                    "give it another name (SPEC as NAME) or another directory"
                )


def recorded_costs(directory: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    """The costs of passes that the run in a directory was begun with; {}: there is no such run.

    A call that resumes it decides by them, whether or not they were kept elsewhere, so that its arms stay the same.
    """
    try:
        there = json.loads((directory / RUN).read_text(encoding="utf-8"))
        same = all(there[name] == value for name, value in json.loads(json.dumps(run)).items())
        return dict(there["costs"]) if same else {}
    except (OSError, ValueError, LookupError, TypeError):  # ``Journal`` says what is wrong
        return {}


def _new_id(session: Mapping[str, Any]) -> str:
    """Name of a new run: UTC time, commit, four hex digits by chance."""
    commit = session.get("environment", {}).get("commit") or "unknown"
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{commit}-{secrets.token_hex(2)}"


Key = tuple[str, str, float, str, int]


def key_of(row: dict[str, Any]) -> Key:
    """(arm, suite, temperature, sample, repeat), which identifies a row."""
    return row["model_id"], row["suite"], row["temperature"], row["question_id"], row["repeat"]


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
