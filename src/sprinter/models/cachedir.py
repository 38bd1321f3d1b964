"""The cache directory. C++ reads what it holds, so files that other users could have written are refused."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from sprinter.errors import UserError
from sprinter.files import write_atomic

__all__ = ["cache_dir", "hash_file", "kept_file", "make_cache_dir", "read_kept", "write_kept"]


def cache_dir() -> Path:
    """Directory of packed weights and converted models: ``SPRINTER_CACHE``, else in the user's cache directory."""
    if own := os.environ.get("SPRINTER_CACHE"):
        return Path(own)
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(root) if root else Path.home() / ".cache") / "sprinter"


def make_cache_dir() -> Path:
    """The cache directory, created for this user alone (mode 0700) if it does not exist.

    Raises:
        UserError: it cannot be created, or another user could have written to it.
    """
    cache = cache_dir()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make the folder '{cache}' ({error.strerror}): set SPRINTER_CACHE to another"
        ) from error
    _check_own(cache)
    return cache


def _check_own(path: Path) -> None:
    """Refuse a file or directory of the cache that another user could have written. POSIX only; elsewhere no check.

    Raises:
        UserError: it belongs to another user, or is writable by its group or by others.
    """
    if not hasattr(os, "geteuid"):
        return
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise UserError(
            f"'{path}' belongs to another user and is not trusted: remove it, or set SPRINTER_CACHE to one of yours"
        )
    if found.st_mode & 0o022:
        raise UserError(
            f"'{path}' can be written by other users and is not trusted: remove it, or, if you know that nobody else "
            f"wrote there, chmod -R go-w '{path}'"
        )


def write_kept(folder: str, name: str, text: str) -> None:
    """Write a small file of the cache, for this user alone.

    Raises:
        OSError: it cannot be written. UserError: the cache directory cannot be made or trusted.
    """
    place = make_cache_dir() / folder / name
    place.parent.mkdir(mode=0o700, exist_ok=True)
    write_atomic(place, text)
    place.chmod(0o600)


def read_kept(folder: str, name: str) -> str | None:
    """The text of a file of the cache; None: it does not exist.

    Raises:
        OSError: it cannot be read. UserError: another user could have written it.
    """
    place = cache_dir() / folder / name
    if not place.exists():
        return None
    _check_own(place)
    return place.read_text(encoding="utf-8")


def kept_file(path: Path, write: Callable[[Path], object], size: int | None = None) -> Path:
    """A large file of the cache, written if it is not there.

    A process that is killed leaves a part, which the next one removes.

    Args:
        path: in the cache directory or a folder of it.
        write: writes a new file. size: bytes of one that is whole; None: not known.

    Raises:
        OSError: it cannot be written. UserError: the cache, or the file, cannot be trusted.
    """
    make_cache_dir()
    path.parent.mkdir(mode=0o700, exist_ok=True)

    def is_whole() -> bool:
        return path.is_file() and size in (None, path.stat().st_size)

    if not is_whole():
        with FileLock(path.parent / "writing.lock"):  # another process may be writing it
            for part in path.parent.iterdir():  # names of models may have a ".part" inside
                if part.name.endswith((".part", f".part{path.suffix}")):
                    part.unlink()
            if not is_whole():
                part = path.with_name(f"{path.stem}.part{path.suffix}")
                try:
                    write(part)
                    part.chmod(0o600)
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
    for kept in (path.parent, path):
        _check_own(kept)
    return path


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
