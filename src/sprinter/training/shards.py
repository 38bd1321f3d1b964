"""Shards: one file a step, whole or not there; what is there says where to go on.

A shard is written to a part file, synchronised to the disk and renamed, and carries the hash of the settings that it
was made with and of its own content. ``labels.json`` repeats what can be told from the shards and the settings.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from sprinter.errors import UserError
from sprinter.training.records import (
    INFO,
    LabelInfo,
    Records,
    read_info,
    shard_metadata,
    shard_name,
    shard_paths,
)

__all__ = ["ShardStore", "shard_bytes"]

_PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shard_bytes(records: Records, settings_hash: str, step: int, counts: Mapping[str, int]) -> bytes:
    """The file of a step.

    Args:
        records: of the step.
        settings_hash: of the data set.
        step: its number.
        counts: "prompts" and "tokens" of the step.
    """
    told = {
        "settings": settings_hash,
        "step": step,
        "positions": len(records),
        "content": records.content_hash(),
    }
    return records.save({name: str(value) for name, value in (told | dict(counts)).items()})


class ShardStore:
    """The directory of one data set.

    Args:
        directory: made if it is not there.
        info: of the data set, as far as it is known before the work.
        restart: delete what an earlier run left there.

    Raises:
        UserError: it cannot be written, or holds labels of other settings.
    """

    def __init__(self, directory: Path, info: LabelInfo, *, restart: bool = False) -> None:
        self._directory, self._hash = directory, info.settings_hash
        if directory.exists() and not directory.is_dir():
            raise UserError(f"'{directory}' is a file: give a directory for the labels")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if restart:
                self.clear()
            self._check(info)
            for part in directory.glob(f"*{_PART}"):  # of a run that was killed
                part.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to '{directory}' ({error.strerror}): give another directory"
            ) from None
        self._there = {step: self._told(path) for step, path in shard_paths(directory).items()}
        if not (directory / INFO).is_file():
            self.write_info(info)

    def __contains__(self, step: int) -> bool:
        """Whether the shard of the step is there, whole and of these settings."""
        return bool(self._there.get(step))

    def __len__(self) -> int:
        return sum(map(bool, self._there.values()))

    def add(self, step: int, data: bytes) -> None:
        """Write the shard of a step.

        Raises:
            UserError: the disk is full, or will not be written.
        """
        path = self._directory / shard_name(step)
        self._write(path, data)
        self._there[step] = self._told(path)

    def total(self, name: str) -> int:
        """Sum of a count ("prompts", "positions", "tokens") over the shards that are there."""
        return sum(int(told[name]) for told in self._there.values() if told)

    def content_hashes(self) -> list[str]:
        """Of all shards, in order of steps."""
        return [told["content"] for _, told in sorted(self._there.items()) if told]

    def write_info(self, info: LabelInfo) -> None:
        """Write ``labels.json``.

        Raises:
            UserError: the disk is full, or will not be written.
        """
        self._write(self._directory / INFO, info.to_json().encode())

    def clear(self) -> None:
        """Delete all labels that are there; other files stay."""
        # labels.json goes last: without it shards would be of unknown origin
        for path in [*shard_paths(self._directory).values(), self._directory / INFO]:
            path.unlink(missing_ok=True)
        self._there = {}

    def _check(self, info: LabelInfo) -> None:
        if not (self._directory / INFO).is_file():
            if shards := shard_paths(self._directory):
                raise UserError(
                    f"'{self._directory}' holds {len(shards)} shards and no {INFO}: give another --out, or --restart"
                )
            return
        there = read_info(self._directory)
        if there.settings_hash != info.settings_hash:
            raise UserError(
                f"'{self._directory}' holds labels made with {_difference(there, info)}: "
                "give another --out, or --restart to delete them and begin anew"
            )

    def _told(self, path: Path) -> dict[str, str]:
        """A shard's metadata; nothing if it is damaged or of other settings, so that it is made again."""
        try:
            told = shard_metadata(path)
        except UserError:
            return {}
        return told if told.get("settings") == self._hash else {}

    def _write(self, path: Path, data: bytes) -> None:
        part = path.with_name(path.name + _PART)
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
            _sync(path.parent)
        except OSError as error:
            part.unlink(missing_ok=True)
            full = (
                "the disk is full: free some space"
                if error.errno in _FULL
                else f"{error.strerror}: mend that"
            )
            raise UserError(
                f"cannot write '{path}', {full} and run the same command again ({len(self)} shards are kept)"
            ) from None


def _sync(directory: Path) -> None:
    """So that the new name survives a power cut; where directories cannot be opened, the file system sees to it."""
    if os.name != "posix":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _difference(there: LabelInfo, now: LabelInfo) -> str:
    """The first thing in which two data sets differ, in words."""
    for name, value in now.settings.items():
        before = there.settings.get(name, "lines" if name == "split" else None)
        if before != value:
            return f"{name}={before} (now {value})"
    if there.draft_fingerprint != now.draft_fingerprint:
        return f"another draft ('{there.draft_id}')"
    if there.target_fingerprint != now.target_fingerprint:
        return f"another target ('{there.target_id}')"
    if there.dtype != now.dtype:
        return f"dtype={there.dtype} (now {now.dtype})"
    if [source["sha256"] for source in there.data] != [source["sha256"] for source in now.data]:
        return "other data files"
    return "another version of this program"
