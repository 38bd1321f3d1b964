"""API keys from a file, and limits of what a key may ask for per minute."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from sprinter.errors import UserError

__all__ = ["ApiKeys", "RateLimit"]

_SHORTEST = 16
_EVERY_S = 1.0
_MOST_OWNERS = 10_000
_WRONG_PER_MINUTE = 10
_COMMENT = re.compile(r"(^|\s)#.*")
_log = logging.getLogger("sprinter.serve")


class ApiKeys:
    """The keys of a file, which is read again when it changes.

    Each line is a key, or a name and a key; "#" begins a comment, at the beginning of a line or after white space. Keys
    are compared as SHA-256 hashes, each with all of the file, so that the time of a comparison says nothing about them.

    A file that changes fails closed: a line that is no key gives none, and without a file, or if everyone may write
    to it, no key is valid.

    Args:
        path: the file. clock: seconds; the file is looked at once a second.

    Raises:
        UserError: the file cannot be read, has no keys or a line that is none, or everyone may write to it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._fault = ""  # why no key is valid
        self._stamp: tuple[int, ...] | None = self._stamped()  # before it is read: it may change meanwhile
        self._checked = clock()
        self._known, faults = self._read()
        if faults:
            raise UserError(faults[0])
        self._wrong = RateLimit(_WRONG_PER_MINUTE, clock)

    @property
    def owners(self) -> int:
        """Number of owners."""
        return len({name for _, name in self._known})

    def owner(self, key: str) -> str | None:
        """Name of a key's owner; None: no such key. Keys without a name have the beginning of their hash."""
        self._reload()
        digest, found = _digest(key), None
        for known, name in self._known:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def admit(self, key: str, client: str) -> tuple[str | None, float]:
        """The key's owner, and how long this client is to wait because of wrong keys; 0: not at all.

        No key is no guess. A right key never waits: others may share the client's address, as behind a proxy.

        Args:
            client: its address.
        """
        owner = self.owner(key) if key else None
        return owner, 0.0 if owner is not None or not key else self._wrong.wait_s(client)

    def _reload(self) -> None:
        if self._clock() - self._checked < _EVERY_S:
            return
        self._checked = self._clock()
        try:
            stamp = self._stamped()
            if stamp == self._stamp:
                return
            self._known, faults = self._read()
            self._stamp, self._fault = stamp, ""
        except UserError as error:
            if str(error) != self._fault:
                _log.error("keys_revoked", extra={"fields": {"keys": 0, "reason": str(error)}})
            self._known, self._stamp, self._fault = [], None, str(error)
            return
        if faults:
            fields = {"keys": len(self._known), "lines": len(faults), "reason": faults[0]}
            _log.error("keys_refused", extra={"fields": fields})
        _log.info("keys_read", extra={"fields": {"keys": len(self._known)}})

    def _stamped(self) -> tuple[int, int, int, int]:
        try:
            about = self._path.stat()
        except OSError as error:
            raise UserError(f"the file of keys {self._path} cannot be read: {error.strerror}") from None
        return about.st_mtime_ns, about.st_size, about.st_ino, about.st_mode

    def _read(self) -> tuple[list[tuple[bytes, str]], list[str]]:
        """(hash, owner) of each key, and what is wrong with other lines."""
        try:
            mode = self._path.stat().st_mode
            lines = self._path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the file of keys {self._path} cannot be read: {error}") from None
        if mode & stat.S_IWOTH:
            raise UserError(
                f"the file of keys {self._path} can be written by everyone: chmod 600 {self._path}"
            )
        if mode & (stat.S_IRGRP | stat.S_IROTH):
            reason = f"{self._path} can be read by others: chmod 600 {self._path}"
            _log.warning("keys_exposed", extra={"fields": {"reason": reason}})
        found: list[tuple[bytes, str]] = []
        faults: list[str] = []
        for number, line in enumerate(lines, 1):
            words = _COMMENT.sub("", line).split()
            if not words:
                continue
            if len(words) > 2 or len(words[-1]) < _SHORTEST or not words[-1].isascii():
                faults.append(
                    f"line {number} of {self._path} is not a key: give a key of at least {_SHORTEST} ASCII characters, "
                    "with a name before it or without"
                )
                continue
            digest = _digest(words[-1])
            found.append((digest, words[0] if len(words) == 2 else f"key-{digest.hex()[:8]}"))
        if not found and not faults:
            raise UserError(f"the file of keys {self._path} has none: write one per line")
        return found, faults


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class RateLimit:
    """A bucket per owner: a minute's worth at once, and then at an even rate.

    Args:
        per_minute: of an owner: requests, texts, tokens, ...; None: no limit. clock: seconds.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = per_minute, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (what is left, at that time)
        self._lock = threading.Lock()  # requests are charged in several threads

    def wait_s(self, owner: str, cost: float = 1.0, *, paid: float = 0.0, take: bool = True) -> float:
        """0 and so much less in the bucket, or the time until there is enough.

        A cost above a minute's worth waits for a full bucket, which it leaves in debt.

        Args:
            paid: part of the cost that was taken before, and is taken again by the next attempt.
            take: False to ask only.
        """
        if self._most is None:
            return 0.0
        rate = self._most / 60
        with self._lock:
            now = self._clock()
            left, at = self._left.pop(owner, (float(self._most), now))
            left = min(self._most, left + (now - at) * rate)
            missing = min(cost, self._most) - left
            wait = missing / rate if missing > paid else 0.0
            self._left[owner] = (left if wait or not take else left + paid - cost, now)
            while len(self._left) > _MOST_OWNERS:
                self._left.popitem(last=False)
        return wait

    def give_back(self, owner: str, amount: float) -> None:
        """Put back what was taken and not used."""
        with self._lock:
            if owner in self._left:
                left, at = self._left[owner]
                self._left[owner] = (left + amount, at)
