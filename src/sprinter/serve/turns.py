"""Work beside the event loop, in which owners take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

__all__ = ["FirstTexts", "Turns"]

_THREADS = 2  # more would make the event loop wait for the interpreter's lock
_PAUSE_S = 0.05
_SLOW = 64  # threads of slow pieces, one an owner; most of them wait for another process
_REST = 4  # times a piece that its owner waits after it, where there are other owners
_FIRST_S = 0.1  # for which others wait for a first text, at most
Worked = TypeVar("Worked")


class FirstTexts:
    """Requests of owners without others, before whose first text no other's work is begun: the interpreter has one
    lock, and what others do holds up the passes of a text that runs alone.

    Others wait a tenth of a second at most, and then go on for as long as they have waited: work of many owners with
    one request each does not keep them waiting. To be used in one event loop.
    """

    def __init__(self) -> None:
        self._none = asyncio.Event()
        self._none.set()
        self._waiting: dict[str, object] = {}  # by owner
        self._began = self._next = 0.0

    def begin(self, owner: str) -> Callable[[], None] | None:
        """Have others wait until what is returned is called; None: they have waited already, and have their turn."""
        loop, one = asyncio.get_running_loop(), object()
        if self._none.is_set():
            if loop.time() < self._next:
                return None
            self._began = loop.time()
            self._none.clear()
            self._timer = loop.call_later(_FIRST_S, self._end)
        self._waiting[owner] = one

        def leave() -> None:
            if self._waiting.get(owner) is one:
                self.end(owner)

        return leave

    def end(self, owner: str) -> None:
        """Have nobody wait for an owner any more, who asks for more than one text: its own work would wait too."""
        if self._waiting.pop(owner, None) and not self._waiting:
            self._end()

    def _end(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer.cancel()
        self._waiting.clear()
        self._next = 2 * now - self._began
        self._none.set()

    async def over(self) -> None:
        """Wait until others may go on."""
        await self._none.wait()


class Turns:
    """Runs pieces of work in threads, of each owner one at a time, so that another owner's waits for one piece at most.

    Work in Python holds up the event loop and the engine: where it is crowded, it takes a fifth of the time at most.

    To be used in one event loop.

    Args:
        crowded: whether other owners than this one ask for something.
        several: whether an owner has several open requests, whose work waits for first texts of others.
    """

    def __init__(
        self,
        crowded: Callable[[str], bool] = lambda owner: False,
        several: Callable[[str], bool] = lambda owner: False,
    ) -> None:
        self.crowded, self._several, self.first = crowded, several, FirstTexts()
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

    async def after_first(self, owner: str) -> None:
        """Let first texts of others go before what an owner with several requests asks."""
        if self._several(owner):
            await self.first.over()

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
            await self.after_first(owner)
            piece = loop.run_in_executor(self._slow if slow else self._threads, timed)
        except BaseException:
            turn.release()
            raise
        piece.add_done_callback(leave)
        return await asyncio.shield(piece)
