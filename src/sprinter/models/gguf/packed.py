"""Packed matrices in a file of the cache directory: made once, mapped by every process that loads the model.

A mapped file takes memory once, whatever the number of processes, and gives it back under pressure: its pages belong
to the system's cache of files.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.cachedir import cache_dir, check_own, hash_file, make_cache_dir
from sprinter.models.kernels import kernels

__all__ = ["ASKED", "SourceFile", "packed_matrices"]

ASKED = "SPRINTER_PACKED"
"""Environment variable: "on" (packed matrices are kept in the cache directory, the default) or "off"."""

_log = logging.getLogger("sprinter")
_LINE = 64  # bytes of a line of the processor's caches, at which a matrix begins
_SPARE = 1 << 28  # bytes of the disk that are left free
_UNUSED_S = 30 * 24 * 3600  # after which a file is removed
_KEPT = 2  # files of a model and dtype: two versions of this package may take turns
_LONGEST = 80  # bytes of a model's name in a file's


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The model's file as it is read.

    Attributes:
        path: its name. size, changed_ns: bytes, and time of the last change, of the file that is open.
    """

    path: Path
    size: int
    changed_ns: int

    def check(self) -> None:
        """Refuse a file that is another by now.

        Raises:
            UserError: its name leads to another file, or it was written to.
        """
        try:
            now = self.path.stat()
            same = (now.st_size, now.st_mtime_ns) == (self.size, self.changed_ns)
        except FileNotFoundError:
            same = False
        if not same:
            raise UserError(f"{self.path} changed while it was read: load it again")


def packed_matrices(
    source: SourceFile,
    dtype: str,
    facts: Sequence[str],
    sizes: Sequence[int],
    fill: Callable[[int, Tensor], object],
) -> list[Tensor] | None:
    """Packed matrices, from the file that is kept for ``source``, which is written if there is none.

    A writer that is killed leaves nothing that is read: the file gets its name when it is complete.

    Args:
        source: the model's file.
        dtype: of the weights; each has files of its own.
        facts: all else that the matrices depend on, but the code of this package.
        sizes: bytes of each matrix.
        fill: packs matrix ``i`` into memory of its size.

    Returns:
        uint8, one tensor a matrix, each at a line of the caches; None: ``SPRINTER_PACKED`` is off, or the file cannot
        be written or read, of which a line is logged.

    Raises:
        UserError: ``SPRINTER_PACKED`` has another value, the cache is not this user's own, or the source changed.
    """
    asked = os.environ.get(ASKED, "on")
    if asked not in ("on", "off"):
        raise UserError(f"{ASKED}={asked!r} is none of its values: use on or off")
    if asked == "off":
        return None
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _LINE) * _LINE
    stem = _stem(source.path, dtype)
    path = cache_dir() / "packed" / f"{stem}{_key(source, [*facts, *map(str, sizes)])}.weights"

    def parts(whole: Tensor) -> list[Tensor]:
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    try:
        whole = _read(path, end)
        if whole is None:
            with _writing(path, source):
                if (whole := _read(path, end)) is None:  # else another process has just written it
                    _write(path, source, stem, end, lambda room: [*map(fill, range(len(sizes)), parts(room))])
                    whole = _read(path, end)
    except OSError as error:
        _log.warning(
            "the packed weights of %s (%.1f GB) cannot be kept in '%s' (%s): each process packs them into its own "
            "memory; make room, set SPRINTER_CACHE to another folder, or %s=off to go without this line",
            source.path.name, end / 1e9, path.parent, error.strerror or error, ASKED,
        )  # fmt: skip
        return None
    return None if whole is None else parts(whole)


def _key(source: SourceFile, facts: Sequence[str]) -> str:
    lines = [*facts, str(source.size), str(source.changed_ns), str(kernels("native").LAYOUT)]
    lines += [hash_file(Path(kernels("layout").__file__)), hash_file(Path(__file__))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _stem(source: Path, dtype: str) -> str:
    """What the names of a model's files begin with: its own, and what tells it from its namesakes."""
    place = hashlib.sha256(os.path.abspath(source).encode()).hexdigest()[:8]
    return f"{source.stem.encode()[:_LONGEST].decode(errors='ignore')}-{place}-{dtype}-"


def _read(path: Path, size: int) -> Tensor | None:
    """The file as memory, which stays mapped as long as the tensor lives; None: there is none of this size.

    Raises:
        OSError: it cannot be read. UserError: ``check_own`` refuses it.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                return None
            for kept in (path.parent, path):
                check_own(kept)
            with suppress(OSError):
                os.utime(path)  # it is in use; the time is no part of any key
            return _mapped(file, mmap.ACCESS_COPY)  # nobody writes, so that nothing is copied
    except FileNotFoundError:
        return None


@contextmanager
def _writing(path: Path, source: SourceFile) -> Iterator[None]:
    """The right to write. Another process may have it for some seconds."""
    make_cache_dir()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(path.parent / "packing.lock")
    try:
        lock.acquire(timeout=1)
    except Timeout:
        _log.warning("waiting for another process that packs weights, to pack those of %s", source.path.name)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, source: SourceFile, stem: str, size: int, fill: Callable[[Tensor], object]) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written. UserError: the source changed.
    """
    _tidy(path, stem)
    if shutil.disk_usage(path.parent).free < size + _SPARE:
        raise OSError(f"less than {(size + _SPARE) / 1e9:.1f} GB of the disk are free")
    _log.warning("packing the weights of %s for this computer, once; some seconds", source.path.name)
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            if hasattr(os, "posix_fallocate"):  # a mapped file that finds the disk full kills the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            fill(_mapped(file, mmap.ACCESS_WRITE))
            source.check()
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _tidy(place: Path, stem: str) -> None:
    """Remove what killed writers left, what was not used for long, and the model's older files but the last ones.

    A process that maps a file keeps it. ``place`` is about to be written.
    """
    found = []
    for path in place.parent.iterdir():
        with suppress(OSError):
            unused_s = time.time() - path.stat().st_mtime
            if path.suffix == ".part" or (path.suffix == ".weights" and unused_s > _UNUSED_S):
                path.unlink()
            elif path.suffix == ".weights" and path.name.startswith(stem) and path != place:
                found.append((unused_s, path))
    for _, path in sorted(found)[_KEPT - 1 :]:
        with suppress(OSError):
            path.unlink()


def _mapped(file: IO[bytes], access: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)
