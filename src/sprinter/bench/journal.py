"""Files that are written as answers come, one JSON object a line, so that an interrupted run can be resumed."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Hashable, KeysView, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Any, Self

from sprinter.errors import UserError
from sprinter.files import read_json_lines, write_atomic, writing

__all__ = [
    "QUALITY", "ROWS", "RUN", "Journal", "KeptLines", "Memory", "hash_of", "key_of", "recorded_costs", "replies",
]  # fmt: skip

RUN, ROWS, QUALITY = "run.json", "rows.jsonl", "quality.jsonl"
_ELSEWHERE = "free it or give another directory"


def key_of(row: Mapping[str, Any]) -> tuple[str, str, float, str, int]:
    """(arm, suite, temperature, sample, repeat), which identifies a row."""
    return row["model_id"], row["suite"], row["temperature"], row["question_id"], row["repeat"]


def hash_of(question: Any) -> str:
    """SHA-256 of a question, which may be any JSON value."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


class Memory:
    """Rows by key, kept in memory only."""

    def __init__(self, key: Callable[[Mapping[str, Any]], Hashable] = key_of) -> None:
        self._key, self._known = key, dict[Hashable, dict[str, Any]]()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows, in the order in which they came."""
        return list(self._known.values())

    @property
    def done(self) -> KeysView[Hashable]:
        """Keys of the rows."""
        return self._known.keys()

    def get(self, key: Hashable) -> dict[str, Any] | None:
        """Row of a key; None: there is none."""
        return self._known.get(key)

    def add(self, row: dict[str, Any]) -> None:
        """Store a row."""
        self._known[self._key(row)] = row


class KeptLines(Memory):
    """Rows in a file, flushed as they come; thread-safe.

    Args:
        path: read if it exists, otherwise created. A last line that was truncated when a run was killed is dropped.
        key: of a row.
        fix: what helps if the file is damaged.

    Raises:
        UserError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path, key: Callable[[Mapping[str, Any]], Hashable], fix: str) -> None:
        super().__init__(key)
        self.path, self._lock = path, Lock()
        with writing(path, _ELSEWHERE):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._known = {key(row): row for row in read_json_lines(path)}
            except (ValueError, LookupError, TypeError):
                raise UserError(f"'{path}' is damaged: {fix}") from None
            write_atomic(path, "".join(map(_line, self.rows)))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, row: dict[str, Any]) -> None:
        """Store a row and flush it.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        again = f"free some space and run the same command again ({len(self._known)} lines are kept)"
        with self._lock, writing(self.path, again):
            self._file.write(_line(row))
            self._file.flush()
            super().add(row)

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def replies(path: Path) -> KeptLines:
    """Records that hold their own "key", such as a judge's replies, so that no question is asked twice."""
    return KeptLines(path, lambda record: str(record["key"]), "move it away and run it again")


class Journal(KeptLines):
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
        self.directory, names = directory, arms or {}
        if directory.exists() and not directory.is_dir():
            raise UserError(f"'{directory}' is a file: give a directory for the results")
        with writing(directory, _ELSEWHERE):
            directory.mkdir(parents=True, exist_ok=True)
            for name in (ROWS, RUN, QUALITY) if restart else ():  # a judge's replies cost money and stay
                (directory / name).unlink(missing_ok=True)
        there = self._check(run)
        known = dict(there.get("arms", {}))
        for name, spec in names.items():
            if known.get(name, spec) != spec:
                raise UserError(
                    f"'{directory}' holds answers of another arm called '{name}' ({known[name]}, now {spec}): "
                    "give it another name (SPEC as NAME) or another directory"
                )
        self.run_id = str(there.get("id") or _new_id(session or {}))
        self._asked = False
        self.sessions = [*there.get("sessions", []), *([dict(session)] if session else [])]
        self._facts = {"id": self.run_id, **run, "arms": {**known, **names}}
        self._facts["costs"] = {**there.get("costs", {}), **(costs or {})}
        self.end_session({})
        super().__init__(directory / ROWS, key_of, "give another directory, or --restart to start over")

    def add(self, row: dict[str, Any]) -> None:
        """Store a row, an answer of this session."""
        super().add(row)
        self._asked = True

    def end_session(self, facts: Mapping[str, Any]) -> None:
        """Store what is known at the end of this session (the load, the time), or forget one that asked nothing new.

        Raises:
            UserError: the file cannot be written.
        """
        if facts and not self._asked and len(self.sessions) > 1:
            self.sessions.pop()
        elif facts:
            self.sessions[-1].update(facts)
        with writing(self.directory / RUN):
            text = json.dumps({**self._facts, "sessions": self.sessions}, indent=1)
            write_atomic(self.directory / RUN, text + "\n")

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


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
