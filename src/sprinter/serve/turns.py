"""Work beside the event loop, in which owners take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

__all__ = ["Turns"]

_THREADS = 2  # more would make the event loop wait for the interpreter's lock
Worked = TypeVar("Worked")


class Turns:
    """Runs pieces of work in threads, of each owner one at a time, so that another owner's waits for one piece at most.

    To be used in one event loop.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "sprinter-serve")
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, owner: str) -> asyncio.Lock:
        """What an owner holds for the time of its turn."""
        return self._turns.setdefault(owner, asyncio.Lock())

    async def run(self, owner: str, work: Callable[[], Worked]) -> Worked:
        """The result of a piece of work; whoever is cancelled meanwhile leaves the line, or lets the piece end."""
        turn = self.of(owner)
        await turn.acquire()
        piece = asyncio.get_running_loop().run_in_executor(self._threads, work)
        piece.add_done_callback(lambda _: turn.release())
        return await asyncio.shield(piece)
