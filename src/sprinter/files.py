"""Atomic writing of files, and reading of JSON lines whose last line may be incomplete."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sprinter.errors import UserError

__all__ = ["read_json_lines", "write_atomic", "writing"]


@contextlib.contextmanager
def writing(path: Path, fix: str = "free some space and run it again") -> Iterator[None]:
    """Turn an OSError inside into a UserError that names the path and says what helps."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write '{path}' ({error.strerror}): {fix}") from None


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
    """Write a temporary file next to ``path``, then rename it: a killed program, or a power cut, leaves the old or the
    new file, and once this returns the new one.

    A link stays a link; the file that it leads to is replaced.

    Args:
        path: the file.
        content: its bytes; text is encoded as UTF-8.

    Returns:
        ``path``.

    Raises:
        OSError: it could not be written, or is a device or directory; no partial file is left.
    """
    place = path.resolve() if path.is_symlink() else path
    if place.exists() and not place.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    part = place.with_name(f"{place.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(place)
        _sync(place.parent)
        return path
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def _sync(directory: Path) -> None:
    """Flush a directory, so that a new name in it survives a power cut; only POSIX systems open directories."""
    if os.name == "posix":
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
