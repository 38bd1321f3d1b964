"""API keys from a file, and limits of what a key may ask for per minute."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from sprinter.errors import UserError

__all__ = ["ApiKeys", "RateLimit"]

_SHORTEST = 16
_EVERY_S = 1.0
_MOST_OWNERS = 10_000
_log = logging.getLogger("sprinter.serve")


class ApiKeys:
    """The keys of a file, which is read again when it changes.

    Each line is a key, or a name and a key; "#" begins a comment. Keys are compared as SHA-256 hashes, each with all of
    the file, so that the time of a comparison says nothing about them.

    Args:
        path: the file. clock: seconds; the file is looked at once a second.

    Raises:
        UserError: the file cannot be read, has no keys, or one that is too short.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._known = self._read()
        self._stamp, self._checked = self._stamped(), clock()

    def owner(self, key: str) -> str | None:
        """Name of a key's owner; None: no such key. Keys without a name have the beginning of their hash."""
        self._reload()
        digest, found = _digest(key), None
        for known, name in self._known:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def _reload(self) -> None:
        if self._clock() - self._checked < _EVERY_S:
            return
        self._checked = self._clock()
        try:
            stamp = self._stamped()
            if stamp != self._stamp:
                self._known, self._stamp = self._read(), stamp
                _log.info("keys_read", extra={"fields": {"keys": len(self._known)}})
        except UserError as error:
            _log.warning("keys_kept", extra={"fields": {"reason": str(error)}})

    def _stamped(self) -> tuple[int, int, int]:
        try:
            about = self._path.stat()
        except OSError as error:
            raise UserError(f"the file of keys {self._path} cannot be read: {error.strerror}") from None
        return about.st_mtime_ns, about.st_size, about.st_ino

    def _read(self) -> list[tuple[bytes, str]]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the file of keys {self._path} cannot be read: {error}") from None
        found: list[tuple[bytes, str]] = []
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 2 or len(words[-1]) < _SHORTEST:
                raise UserError(
                    f"line {number} of {self._path} is no key: give a key of at least {_SHORTEST} characters, "
                    "with a name before it or without"
                )
            digest = _digest(words[-1])
            found.append((digest, words[0] if len(words) == 2 else f"key-{digest.hex()[:8]}"))
        if not found:
            raise UserError(f"the file of keys {self._path} has none: write one per line")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """A bucket per owner: a minute's requests at once, and then at an even rate.

    Args:
        per_minute: requests per minute of an owner. clock: seconds.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (requests left, at that time)

    def wait_s(self, owner: str) -> float:
        """0 and one request less, or the time until there is one."""
        now, rate = self._clock(), self._most / 60
        left, at = self._left.pop(owner, (float(self._most), now))
        left = min(self._most, left + (now - at) * rate)
        wait = 0.0 if left >= 1 else (1 - left) / rate
        self._left[owner] = (left if wait else left - 1, now)
        while len(self._left) > _MOST_OWNERS:
            self._left.popitem(last=False)
        return wait
