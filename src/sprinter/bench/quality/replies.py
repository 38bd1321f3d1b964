"""Records by key in a JSON lines file: a judge's replies, stored so that no question is asked twice."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from threading import Lock
from typing import Any

from sprinter.errors import UserError
from sprinter.files import read_json_lines, write_atomic

__all__ = ["Replies", "key_of"]


def key_of(question: Any) -> str:
    """SHA-256 of a question, which may be any JSON value."""
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()


class Replies:
    """A file of records, each with a "key". It is thread-safe.

    Args:
        path: read if it exists, otherwise created. A last line that was truncated when a run was killed is dropped.

    Raises:
        UserError: the file cannot be read or written, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known = {record["key"]: record for record in read_json_lines(path)}
            if path.exists():  # drops a truncated last line
                write_atomic(path, "".join(map(_line, self._known.values())))
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise UserError(
                f"cannot write to '{path}' ({error.strerror}): free it or give another directory"
            ) from None
        except (ValueError, LookupError, TypeError):
            raise UserError(f"'{path}' is damaged: move it away and run it again") from None

    def get(self, key: str) -> dict[str, Any] | None:
        """Record of a question; None if it was not asked yet."""
        return self._known.get(key)

    def add(self, record: dict[str, Any]) -> None:
        """Store a record and flush it.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        with self._lock:
            try:
                self._file.write(_line(record))
                self._file.flush()
            except OSError as error:
                raise UserError(
                    f"cannot write to '{self.path}' ({error.strerror}): free some space and run it again"
                ) from None
            self._known[record["key"]] = record

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
