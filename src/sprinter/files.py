"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["write_atomic"]


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
