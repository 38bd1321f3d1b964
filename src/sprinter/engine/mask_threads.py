"""Threads in which grammars are asked what may follow, beside the engine's."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock, Timer, local
from typing import TypeVar

from sprinter.engine.fair_queue import FairQueue

__all__ = ["MaskThreads", "note_held"]

MaskAnswer = TypeVar("MaskAnswer")
_SHORT_S = 0.002
"""CPU time with the interpreter's lock after which an owner rests: the engine takes the lock after each operation."""
_REST = 9
"""How many times as long."""
_held = local()


def note_held(seconds: float) -> None:
    """Count time for which this thread has held the interpreter's lock in one go."""
    _held.s = getattr(_held, "s", 0.0) + seconds


class MaskThreads:
    """Threads in which owners take turns, and rest after work that has held the interpreter's lock for long. Who has no
    name has no others beside it."""

    def __init__(self) -> None:
        self._line: FairQueue[tuple[str, Callable[[], Callable[[], None]]]] = FairQueue()
        self._lock, self._pool = Lock(), ThreadPoolExecutor(2, "sprinter-masks")
        self._rests: dict[str, float] = {}  # until when owners rest

    def submit(self, owner: str, find: Callable[[], MaskAnswer]) -> Future[MaskAnswer]:
        """Answer when it is the owner's turn."""
        found: Future[MaskAnswer] = Future()
        with self._lock:
            self._line.put(owner, (owner, partial(_answer, found, find)))
        self._pool.submit(self._next)
        return found

    def _next(self) -> None:
        now = time.perf_counter()
        with self._lock:
            self._rests = {owner: until for owner, until in self._rests.items() if until > now}
            waiting = len(self._line) > sum(map(self._line.of, self._rests))
            owner, work = self._line.pop(but=self._rests) if waiting else ("", None)
            rest_s = 0 if waiting else min(self._rests.values()) - now
        if work is None:
            later = Timer(rest_s, self._pool.submit, (self._next,))
            later.daemon = True
            later.start()
            return
        _held.s = 0.0
        settle = work()
        if owner and _held.s > _SHORT_S:
            with self._lock:
                self._rests[owner] = time.perf_counter() + _REST * _held.s
        settle()


def _answer(found: Future[MaskAnswer], find: Callable[[], MaskAnswer]) -> Callable[[], None]:
    """What hands over an answer, once it is found."""
    try:
        return partial(found.set_result, find())
    except Exception as error:
        return partial(found.set_exception, error)
