"""Work beside the event loop, in which owners take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

__all__ = ["Turns"]

_THREADS = 2  # more would make the event loop wait for the interpreter's lock
_PAUSE_S = 0.05
_SLOW = 4  # threads of slow pieces, so that another owner's is not waited for
_REST = 4  # times a piece that its owner waits after it, where there are other owners
Worked = TypeVar("Worked")


class Turns:
    """Runs pieces of work in threads, of each owner one at a time, so that another owner's waits for one piece at most.

    Work in Python holds up the event loop and the engine: where it is crowded, it takes a fifth of the time at most.

    To be used in one event loop.

    Args:
        crowded: whether other owners than this one ask for something.
    """

    def __init__(self, crowded: Callable[[str], bool] = lambda owner: False) -> None:
        self.crowded = crowded
        self._threads = ThreadPoolExecutor(_THREADS, "sprinter-serve")
        self._slow = ThreadPoolExecutor(_SLOW, "sprinter-slow")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, owner: str) -> asyncio.Lock:
        """What an owner holds for the time of its turn."""
        return self._turns.setdefault(owner, asyncio.Lock())

    async def pause(self, line: str, owner: str) -> None:
        """Wait where other owners ask too, one in a line at a time: so many a second are refused, or leave, that asking
        again at once gains nothing and costs others little."""
        if self.crowded(owner):
            async with self.of(line):
                await asyncio.sleep(_PAUSE_S)

    async def run(self, owner: str, work: Callable[[], Worked], *, slow: bool = False) -> Worked:
        """The result of a piece of work; whoever is cancelled meanwhile leaves the line, or lets the piece end.

        Args:
            slow: it may wait for seconds: such pieces have threads of their own.
        """
        turn, loop, took_s = self.of(owner), asyncio.get_running_loop(), 0.0
        await turn.acquire()

        def timed() -> Worked:
            nonlocal took_s
            began = time.thread_time()
            try:
                return work()
            finally:
                took_s = time.thread_time() - began

        def leave(done: asyncio.Future[Worked]) -> None:
            if not done.cancelled():
                done.exception()  # nobody may wait for it any more, which asyncio would write to the log
            loop.call_later(_REST * took_s if self.crowded(owner) else 0, turn.release)

        try:
            piece = loop.run_in_executor(self._slow if slow else self._threads, timed)
        except BaseException:
            turn.release()
            raise
        piece.add_done_callback(leave)
        return await asyncio.shield(piece)
