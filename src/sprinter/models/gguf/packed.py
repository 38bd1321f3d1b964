"""Packed matrices in a file of the cache directory: made once, mapped by every process that loads the model.

A mapped file takes memory once, whatever the number of processes, and gives it back under pressure: its pages belong
to the system's cache of files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.cachedir import cache_dir, hash_file, kept_file

__all__ = ["ASKED", "SourceFile", "packed_matrices"]

ASKED = "SPRINTER_PACKED"
"""Environment variable: "on" (packed matrices are kept in the cache directory, the default) or "off"."""

_log = logging.getLogger("sprinter")
_LINE = 64  # bytes of a line of the processor's caches, at which a matrix begins
_SPARE = 1 << 28  # bytes of the disk that are left free
_UNUSED_S = 30 * 24 * 3600  # after which a file is removed
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
    pack: Callable[[int, Tensor], object],
) -> list[Tensor] | None:
    """Packed matrices, from the file that is kept for ``source``, which is written if there is none.

    Args:
        source: the model's file.
        dtype: of the weights, a part of the file's name.
        facts: all that the matrices depend on, but the state of ``source`` and the code of this module.
        sizes: bytes of each matrix.
        pack: packs matrix ``i`` into memory of its size.

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
    *starts, end = accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0)
    lines = [*facts, *map(str, sizes), str(source.size), str(source.changed_ns), hash_file(Path(__file__))]
    key = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    name = source.path.stem.encode()[:_LONGEST].decode(errors="ignore")
    path = cache_dir() / "packed" / f"{name}-{dtype}-{key}.weights"

    def parts(file: Path, shared: bool) -> list[Tensor]:
        whole = torch.from_file(str(file), shared, end, dtype=torch.uint8)
        return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def write(part: Path) -> None:
        _remove_unused(path.parent)
        if shutil.disk_usage(path.parent).free < end + _SPARE:
            raise OSError(f"less than {(end + _SPARE) / 1e9:.1f} GB of the disk are free")
        _log.warning("packing the weights of %s for this computer, once; some seconds", source.path.name)
        with part.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # a mapped file that finds the disk full kills the process
                os.posix_fallocate(file.fileno(), 0, end)
            else:
                file.truncate(end)
            for i, room in enumerate(parts(part, True)):
                pack(i, room)
            source.check()
            os.fsync(file.fileno())

    try:
        kept_file(path, write, end)
        with suppress(OSError):  # the folder may be read-only
            os.utime(path)  # it is in use
        return parts(path, False)
    except OSError as error:
        _log.warning(
            "the packed weights of %s (%.1f GB) cannot be kept in '%s' (%s): each process packs them into its own "
            "memory; make room, set SPRINTER_CACHE to another folder, or %s=off to go without this line",
            source.path.name, end / 1e9, path.parent, error.strerror or error, ASKED,
        )  # fmt: skip
        return None


def _remove_unused(folder: Path) -> None:
    """Remove what was not used for long; a process that maps a file keeps it."""
    for path in folder.glob("*.weights"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNUSED_S:
                path.unlink()
