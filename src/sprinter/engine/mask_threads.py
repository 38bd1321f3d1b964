"""Threads in which grammars are asked what may follow, beside the engine's."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

__all__ = ["MaskThreads"]

MaskAnswer = TypeVar("MaskAnswer")
_MOST = 64  # threads; most of them wait for another process


class MaskThreads:
    """Threads in which each owner's questions are answered one after the other, beside those of others, so that hard
    grammars take one core at most. Who has no name has no others beside it, and two threads."""

    def __init__(self) -> None:
        self._lock, self._pool = Lock(), ThreadPoolExecutor(_MOST, "sprinter-masks")
        self._lines: defaultdict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = defaultdict(deque)
        self._busy: Counter[str] = Counter()

    def submit(self, owner: str, find: Callable[[], MaskAnswer]) -> Future[MaskAnswer]:
        """Answer when it is its turn."""
        found: Future[MaskAnswer] = Future()
        with self._lock:
            self._lines[owner].append((found, find))
            if free := self._busy[owner] < (1 if owner else 2):
                self._busy[owner] += 1
        if free:
            self._pool.submit(self._work, owner)
        return found

    def _work(self, owner: str) -> None:
        while True:
            with self._lock:
                if not (line := self._lines[owner]):
                    self._busy[owner] -= 1
                    if not self._busy[owner]:
                        del self._busy[owner], self._lines[owner]
                    return
                found, find = line.popleft()
            if not found.set_running_or_notify_cancel():
                continue
            try:
                found.set_result(find())
            except Exception as error:
                found.set_exception(error)
            except BaseException as error:  # a panic of llguidance, which would end more than this text
                found.set_exception(RuntimeError(repr(error)))
