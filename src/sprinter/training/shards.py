"""Shards: one file per step, written atomically, so that an interrupted run resumes from the shards that exist.

A shard is written to a part file, flushed to disk and renamed. Its metadata hold the hash of the settings that it was
made with and the hash of its content. ``labels.json`` summarises shards and settings and can be made again from them.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path

from sprinter.errors import UserError
from sprinter.files import write_atomic, writing
from sprinter.training.records import (
    INFO,
    LabelInfo,
    Records,
    read_info,
    shard_metadata,
    shard_name,
    shard_paths,
)

__all__ = ["ShardStore", "save_bytes", "shard_bytes"]

_PART = ".part"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shard_bytes(records: Records, settings_hash: str, step: int, counts: Mapping[str, int]) -> bytes:
    """Bytes of the shard file of a step.

    Args:
        records: records of the step.
        settings_hash: hash of the data set's settings.
        step: number of the step.
        counts: "prompts" and "tokens" of the step.
    """
    metadata = {
        "settings": settings_hash,
        "step": step,
        "positions": len(records),
        "content": records.content_hash(),
    }
    return records.save({name: str(value) for name, value in (metadata | dict(counts)).items()})


class ShardStore:
    """Directory of one data set.

    Args:
        directory: created if it does not exist.
        info: description of the data set, as far as it is known before labelling.
        restart: delete the labels of earlier runs.

    Raises:
        UserError: the directory cannot be written, or holds labels of other settings.
    """

    def __init__(self, directory: Path, info: LabelInfo, *, restart: bool = False) -> None:
        self._directory, self._hash = directory, info.settings_hash
        if directory.exists() and not directory.is_dir():
            raise UserError(f"'{directory}' is a file: give a directory for the labels")
        with writing(directory, "give another directory"):
            directory.mkdir(parents=True, exist_ok=True)
            if restart:
                self.clear()
            self._check(info)
            for part in directory.glob(f"*{_PART}"):  # left by a run that was killed
                part.unlink(missing_ok=True)
        self._there = {step: self._metadata(path) for step, path in shard_paths(directory).items()}
        if not (directory / INFO).is_file():
            self.write_info(info)

    def __contains__(self, step: int) -> bool:
        """Whether the shard of the step exists, is undamaged and was made with these settings."""
        return bool(self._there.get(step))

    def __len__(self) -> int:
        return sum(map(bool, self._there.values()))

    def add(self, step: int, data: bytes) -> None:
        """Write the shard of a step.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        path = self._directory / shard_name(step)
        self._write(path, data)
        self._there[step] = self._metadata(path)

    def total(self, name: str) -> int:
        """Sum of a count ("prompts", "positions", "tokens") over the existing shards."""
        return sum(int(metadata[name]) for metadata in self._there.values() if metadata)

    def content_hashes(self) -> list[str]:
        """Content hashes of all shards, in order of steps."""
        return [metadata["content"] for _, metadata in sorted(self._there.items()) if metadata]

    def write_info(self, info: LabelInfo) -> None:
        """Write ``labels.json``.

        Raises:
            UserError: the disk is full or cannot be written.
        """
        self._write(self._directory / INFO, info.to_json().encode())

    def clear(self) -> None:
        """Delete all labels; other files stay."""
        # labels.json is deleted last: without it the origin of the shards would be unknown
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
                "give another --out, or --restart to delete them and start over"
            )

    def _metadata(self, path: Path) -> dict[str, str]:
        """A shard's metadata; empty if it is damaged or of other settings, so that it is made again."""
        try:
            metadata = shard_metadata(path)
        except UserError:
            return {}
        return metadata if metadata.get("settings") == self._hash else {}

    def _write(self, path: Path, data: bytes) -> None:
        save_bytes(path, data, f"{len(self)} shards are kept")


def save_bytes(path: Path, content: bytes | str, kept: str = "what is done is kept") -> None:
    """Write a file whole or not at all; ``kept``: what a run that is continued finds, for the message.

    Raises:
        UserError: the disk is full, or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)
    except OSError as error:
        why = "the disk is full: free some space" if error.errno in _FULL else f"{error.strerror}: fix that"
        raise UserError(f"cannot write '{path}', {why} and run the same command again ({kept})") from None


def _difference(there: LabelInfo, now: LabelInfo) -> str:
    """First difference between two data sets, as text."""
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
