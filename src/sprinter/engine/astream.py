"""Streaming for asyncio: one text, token by token, without blocking the event loop."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sprinter.decode.draft import Token
from sprinter.engine.generation import Generation
from sprinter.engine.stream import Stream

__all__ = ["AsyncStream", "LazyStream"]

Returned = TypeVar("Returned")


class AsyncStream(ABC):
    """Asynchronous iterator over the tokens of one text, as they become final; ``Stream`` describes the tokens.

    Cancelling the task that waits for a token cancels the text. A stream that is left early should be closed, with
    ``async with`` or ``aclose``; one that is garbage-collected is closed too. One task may read at a time.
    """

    def __init__(self) -> None:
        self._ready: deque[Token] = deque()

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Token:
        if not self._ready:
            self._ready.extend(await self.read())
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    @abstractmethod
    async def read(self) -> list[Token]:
        """Wait for new tokens; [] at the end. Not to be mixed with iteration.

        Raises:
            Exception: the error that ended the text, once: logits that are not finite, an exception of a rule.
            EngineError: of an ``AsyncEngine``: it was closed, it died, or there is no memory.
        """

    @property
    @abstractmethod
    def generation(self) -> Generation | None:
        """The result; None before the text has ended or was closed (``finish_reason`` "cancelled")."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop decoding; returns when the text's rows are free."""

    async def finish(self) -> Generation:
        """Read to the end, and return the whole result.

        Raises:
            Exception: as ``read``.
        """
        while await self.read():
            pass
        assert self.generation is not None
        return self.generation

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class LazyStream(AsyncStream):
    """A ``Stream`` whose steps run in a thread of its own, each when the next token is asked for.

    Args:
        stream: the text; nothing else may use it.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream, self._over = stream, False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sprinter-stream")

    def __repr__(self) -> str:
        return f"Async{self._stream!r}"

    async def read(self) -> list[Token]:
        if self._over:
            return []
        try:
            token = await self._run(lambda: next(self._stream, None))
        except Exception:  # raised once, as by the stream
            self._end()
            raise
        if token is None:
            self._end()
            return []
        return [token]

    @property
    def generation(self) -> Generation | None:
        return self._stream.generation if self._over else None

    async def finish(self) -> Generation:
        if not self._over:
            await self._run(self._stream.finish)
            self._end()
        return self._stream.generation

    async def aclose(self) -> None:
        if not self._over:
            await self._run(self._stream.close)
            self._end()

    def _end(self) -> None:
        self._over = True
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[[], Returned]) -> Returned:
        """Call in the stream's thread; a cancelled caller closes the stream after the call."""
        done = self._thread.submit(call)
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            self._thread.submit(self._stream.close)  # behind the call that is under way
            self._end()
            raise
