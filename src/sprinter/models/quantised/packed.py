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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

import torch
from filelock import FileLock
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.cachedir import cache_dir, check_own, make_cache_dir
from sprinter.models.capture.marks import hash_file

__all__ = ["ASKED", "packed_matrices"]

ASKED = "SPRINTER_PACKED"
"""Environment variable: "on" (packed matrices are kept in the cache directory, the default) or "off"."""

_log = logging.getLogger("sprinter")
_HERE = Path(__file__).parent
_CODE = [_HERE / name for name in ("pack.h", "products.h", "layout.py", "packed.py")]
_LINE = 64  # bytes of a line of the processor's caches, at which a matrix begins
_SPARE = 1 << 28  # bytes of the disk that are left free


def packed_matrices(
    source: Path,
    dtype: str,
    facts: Sequence[str],
    sizes: Sequence[int],
    fill: Callable[[int, Tensor], object],
) -> list[Tensor] | None:
    """Packed matrices, from the file that is kept for ``source``, which is written if there is none.

    A writer that is killed leaves nothing that is read: the file gets its name when it is complete.

    Args:
        source: the model's file. Its size and the time of its last change are part of what is compared; the file that
            is kept for an older state is removed.
        dtype: of the weights; each has a file of its own.
        facts: all else that the matrices depend on.
        sizes: bytes of each matrix.
        fill: packs matrix ``i`` into memory of its size.

    Returns:
        uint8, one tensor a matrix, each at a line of the caches; None: ``SPRINTER_PACKED`` is off, or there is no room
        on the disk, of which a line is logged.

    Raises:
        UserError: ``SPRINTER_PACKED`` has another value, or the cache is not this user's own.
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
    path = _path(source, dtype, [*facts, *map(str, sizes)])
    if not _whole(path, end):
        try:
            _write(
                path,
                source,
                dtype,
                end,
                lambda i, whole: fill(i, _part(whole, starts[i], sizes[i])),
                len(sizes),
            )
        except OSError as error:
            _log.warning(
                "the packed weights of %s (%.1f GB) cannot be kept in '%s' (%s): each process packs them into its own "
                "memory; make room, set SPRINTER_CACHE to another folder, or %s=off to go without this line",
                source.name, end / 1e9, path.parent, error.strerror or error, ASKED,
            )  # fmt: skip
            return None
    for kept in (path.parent, path):
        check_own(kept)
    with path.open("rb") as file:
        whole = _mapped(file, mmap.ACCESS_COPY)  # nobody writes, so that nothing is copied
    return [_part(whole, start, size) for start, size in zip(starts, sizes, strict=True)]


def _path(source: Path, dtype: str, facts: Sequence[str]) -> Path:
    """Where the file is kept: its name begins with that of the source, and with what tells it from its namesakes."""
    state = source.stat()
    lines = [*facts, str(state.st_size), str(state.st_mtime_ns), *map(hash_file, _CODE)]
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return cache_dir() / "packed" / f"{_stem(source, dtype)}{key}.weights"


def _stem(source: Path, dtype: str) -> str:
    return f"{source.stem}-{hashlib.sha256(str(source.resolve()).encode()).hexdigest()[:8]}-{dtype}-"


def _whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write(
    path: Path, source: Path, dtype: str, size: int, fill: Callable[[int, Tensor], object], count: int
) -> None:
    """Write the file.

    Raises:
        OSError: it cannot be written.
    """
    make_cache_dir()
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with FileLock(path.parent / "packing.lock"):  # another process may be packing
        if _whole(path, size):
            return
        for stale in path.parent.glob("*.part"):  # left by a process that was killed
            stale.unlink()
        if shutil.disk_usage(path.parent).free < size + _SPARE:
            raise OSError(f"less than {(size + _SPARE) / 1e9:.1f} GB of the disk are free")
        _log.warning("packing the weights of %s for this computer, once; some seconds", source.name)
        with _part_file(path) as file:
            if hasattr(os, "posix_fallocate"):  # a mapped file that finds the disk full kills the process
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
            whole = _mapped(file, mmap.ACCESS_WRITE)
            for i in range(count):
                fill(i, whole)
        for old in path.parent.glob(f"{_stem(source, dtype)}*.weights"):
            if old != path:
                with suppress(OSError):
                    old.unlink()


@contextmanager
def _part_file(path: Path) -> Iterator[IO[bytes]]:
    """A new file, which becomes ``path`` at the end, or is removed."""
    with NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        part = Path(file.name)
        try:
            yield file
            os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _mapped(file: IO[bytes], access: int) -> Tensor:
    """A file as memory; it stays mapped as long as the tensor lives."""
    return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=access), dtype=torch.uint8)


def _part(whole: Tensor, start: int, size: int) -> Tensor:
    return whole[start : start + size]
