"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

__all__ = ["read_json_lines", "write_atomic"]


def read_json_lines(path: Path) -> list[Any]:
    """The values of a file of JSON lines, none if there is no file. A last line that was cut is dropped.

    Raises:
        ValueError: a whole line is not JSON.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write beside ``path``, then rename: a killed program leaves the old file or the new one. Text goes as UTF-8.

    Raises:
        OSError: it could not be written; no half file is left.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        return part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
