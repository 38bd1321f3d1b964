"""Atomic writing of files, and reading of JSON lines whose last line may be incomplete."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

__all__ = ["read_json_lines", "write_atomic"]


def read_json_lines(path: Path) -> list[Any]:
    """Read the values of a JSON lines file; a missing file has none, and an incomplete last line is dropped.

    Raises:
        ValueError: a complete line is not JSON.
        OSError: the file cannot be read.
    """
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", errors="replace") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def write_atomic(path: Path, content: bytes | str) -> Path:
    """Write a temporary file next to ``path``, then rename it: a killed program leaves the old or the new file.

    Args:
        path: the file.
        content: its bytes; text is encoded as UTF-8.

    Returns:
        ``path``.

    Raises:
        OSError: it could not be written; no partial file is left.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        return part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
