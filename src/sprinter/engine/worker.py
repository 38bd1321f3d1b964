"""The thread of an ``AsyncEngine``: takes requests, steps the engine, hands tokens to their readers.

Other threads speak to it through a queue of calls, which it runs between two steps; without work it waits for the next
call. A ``SimpleQueue`` is used because finalizers put calls into it too, in any thread and at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Lock, RLock, Thread, current_thread
from typing import Any

import torch

from sprinter.decode.draft import Token
from sprinter.engine.engine import Engine
from sprinter.engine.fair_queue import FairQueue, Shares
from sprinter.engine.generation import Generation
from sprinter.engine.request import Request
from sprinter.engine.scoring import Scoring
from sprinter.errors import (
    ClosedEngineError,
    DeadEngineError,
    EngineError,
    NoMemoryError,
    QueueFullError,
    SprinterError,
)

__all__ = ["AsyncRequest", "EngineWorker"]

News = asyncio.Future[None]
"""What a task that reads waits for, in its event loop."""
_EXPECTED_S = 0.01
"""Maximum time for which a request is expected."""
_NEWEST = 0.2
"""Weight of the newest text in the mean time that texts have rows."""


@dataclass(eq=False)
class AsyncRequest:
    """A request of an ``AsyncEngine``, which the engine's thread writes to and one task reads from.

    Attributes:
        owner: requests of different owners take turns.
        number: the engine's number, once it has rows.
        generation, error: at the end.
        queued, admitted, first, ended: times of ``time.perf_counter``, None before.
        started, over: futures that are done when it has rows, and at the end.
    """

    task: Request
    owner: str
    number: int | None = None
    generation: Generation | None = None
    error: Exception | None = None
    queued: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    first: float | None = None
    ended: float | None = None
    started: Future[None] = field(default_factory=Future)
    over: Future[None] = field(default_factory=Future)
    _tokens: list[Token] = field(default_factory=list)
    _news: News | None = None  # what the reader waits for
    _lock: Lock = field(default_factory=Lock)

    async def read(self) -> list[Token]:
        """Wait for new tokens; [] at the end."""
        with self._lock:
            wait = not self._tokens and self.ended is None
            if wait and self._news is not None:
                raise SprinterError("another task reads this stream already")
            news = self._news = asyncio.get_running_loop().create_future() if wait else self._news
        if wait and news is not None:
            try:
                await news
            finally:
                self._news = None
        with self._lock:
            tokens, self._tokens = self._tokens, []
        return tokens

    def put(self, tokens: list[Token]) -> News | None:
        """Hand over new tokens; called by the engine's thread, which is to ``wake`` who waits for them."""
        if self.first is None and tokens:
            self.first = time.perf_counter()
        with self._lock:
            self._tokens += tokens
            return self._news

    def end(self, generation: Generation | None, error: Exception | None) -> None:
        """Hand over the result; called by the engine's thread, once."""
        self.generation, self.error, self.ended = generation, error, time.perf_counter()
        _wake([self.put([])])
        if not self.started.done():
            self.started.set_result(None)
        self.over.set_result(None)


@dataclass(slots=True)
class _Arrivals:
    """Requests of owners without others that are about to be put.

    Attributes:
        only: number of those that are submitted.
        owner, until: whose is about to be, and until when it is waited for, in seconds of ``time.perf_counter``.
    """

    only: int = 0
    owner: str = ""
    until: float = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self.until - time.perf_counter())


class EngineWorker:
    """Owns an engine and a thread.

    Args:
        engine: nothing else may use it. rows: number of its rows.
        max_waiting: maximum number of requests that wait for rows.
        on_death: called in the engine's thread, with the error, if it stops with one.
        shared_queue, shared_rows: as in ``AsyncEngine``.

    Attributes:
        error: the error that the thread has stopped with.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        max_waiting: int,
        on_death: Callable[[BaseException], None] | None,
        shared_queue: bool = False,
        shared_rows: int = 0,
    ) -> None:
        self.engine, self.rows, self.max_waiting = engine, rows, max_waiting
        self.error: BaseException | None = None
        self._on_death = on_death
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._expected = expected = _Arrivals()
        calls = self._calls  # the engine holds no worker
        engine.arrived = lambda: 2 if expected.only or expected.left_s > 0 else int(not calls.empty())
        self._line: FairQueue[AsyncRequest] = FairQueue()
        self._live: dict[int, AsyncRequest] = {}  # the order of admission
        self._scorings: FairQueue[Scoring[Any]] = FairQueue()
        self._scored: Scoring[Any] | None = None  # the one that is under way
        self._lock, self._open = RLock(), 0  # a finalizer may close the engine in this thread too
        # those with rows included
        self._places: dict[type, Shares] = {
            kind: Shares(rows + max_waiting, shared=shared_queue, own=rows)
            for kind in (AsyncRequest, Scoring)
        }
        self._left_free = min(shared_rows, rows // 2)
        self._text_s = 0.0  # how long a text has its rows, a running mean
        self._closing: str | None = None
        self._stopped = self._over = self._put_off = False
        self._drained: Future[None] | None = None
        self._thread = Thread(target=self._run, name="sprinter-engine", daemon=True)
        self._thread.start()

    # --- called in any thread ---
    @property
    def open(self) -> int:
        """Number of requests that have not ended."""
        return self._open

    @property
    def waiting(self) -> int:
        """Number of requests that wait for rows."""
        return max(0, self._open - self.rows)

    @property
    def wait_s(self) -> float:
        """Time until all that wait now will have got rows, at the pace of the last texts; 0: none has ended yet."""
        return self._text_s * (self.waiting + 1) / self.rows

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken."""
        return self._closing is not None

    def submit(self, request: AsyncRequest) -> None:
        """Put a request in the queue.

        Raises:
            EngineError: it is not taken.
        """
        with self._lock:
            self._check_open()
            self._check_places(AsyncRequest, request.owner)
            places = self._places[AsyncRequest]
            only = places.others(request.owner) and not places.of(request.owner)
            places.take(request.owner)
            self._open, self._expected.only = self._open + 1, self._expected.only + only
            self._calls.put(lambda: self._enter(request, only))

    def expect(self, owner: str) -> Callable[[], None]:
        """Step no further for a moment, or until an owner's request is put, or what is returned is called."""
        until = time.perf_counter() + _EXPECTED_S
        self._expected.owner, self._expected.until = owner, until

        def withdraw() -> None:
            if self._expected.until == until:
                self._expected.until = 0.0
                self._calls.put(lambda: None)  # the thread may wait for it

        return withdraw

    def score(self, scoring: Scoring[Any]) -> None:
        """Run a scoring, a chunk per step of the engine; a cancelled future ends it.

        Raises:
            EngineError: it is not taken.
        """
        with self._lock:
            self._check_open()
            self._check_places(Scoring, scoring.owner)
            self._places[Scoring].take(scoring.owner)
            self._calls.put(lambda: self._scorings.put(scoring.owner, scoring))

    def check_room(self, owner: str, count: int) -> None:
        """Refuse requests that would not be taken, before they are made.

        Raises:
            EngineError: there are not so many places now.
        """
        with self._lock:
            self._check_open()
            self._check_places(AsyncRequest, owner, count)

    def _check_places(self, kind: type, owner: str, count: int = 1) -> None:
        """Check for places of requests or of scorings.

        Raises:
            QueueFullError: there are not so many.
        """
        places = self._places[kind]
        if not places.fits(owner, count):
            own, left = max(0, places.of(owner) - self.rows), places.free
            raise QueueFullError(
                f"{own} of your requests wait already, and {left} places are left for all: try again later"
                if left > 0
                else f"{self.rows} requests are served and {self.max_waiting} wait already: try again later",
                self.wait_s,
            )

    def _leave_place(self, kind: type, owner: str) -> None:
        with self._lock:
            self._places[kind].take(owner, -1)

    def cancel(self, request: AsyncRequest) -> None:
        """Cancel a request before the next step; also called by finalizers."""
        self._calls.put(lambda: self._cancel(request))

    def drain(self) -> Future[None]:
        """Take no more requests; the future is done when none is left."""
        with self._lock:
            self._closing = self._closing or "the engine is about to close, and takes no more requests"
            drained = self._drained = self._drained or Future()
            if self._over:
                self._check_drained()
        self._calls.put(self._check_drained)
        return drained

    def close(self) -> None:
        """Cancel all requests, and end the thread."""
        with self._lock:
            self._closing = "the engine is closed: make another"
        self._calls.put(lambda: setattr(self, "_stopped", True))
        if self._thread is not current_thread():  # else a finalizer runs in it
            self._thread.join()

    def _check_open(self) -> None:
        if self.error is not None:
            raise DeadEngineError(_dead(self.error)) from self.error
        if self._closing is not None:
            raise ClosedEngineError(self._closing)

    # --- called in the thread ---
    def _run(self) -> None:
        failed: BaseException | None = None
        try:
            while not self._stopped:
                self._round()
        except BaseException as error:  # nobody else would hear of it
            failed = error
        with self._lock:
            self.error, self._over = failed, True
            self._closing = self._closing or "the engine is closed: make another"
        self._end_all(failed)
        with suppress(Exception):  # what is broken may not be closed cleanly; the first error is reported
            self.engine.close()
        if failed is not None and self._on_death is not None:
            self._on_death(failed)

    def _round(self) -> None:
        """Run the calls, admit requests, step the engine, and score a chunk; wait if there is nothing to do."""
        if not (self._line or self._live or self._scorings or self._scored):
            self._calls.get()()
        with suppress(Empty):
            while True:
                left_s = self._expected.left_s
                self._calls.get(left_s > 0, left_s)()
        if self._stopped:
            return
        while len(self._live) < self.rows and len(self._line) > sum(map(self._line.of, full := self._full())):
            self._admit(self._line.pop(but=full))
        if self._live:
            self._step()
        if self._scorings or self._scored:
            self._put_off = (
                not self._put_off and self.engine.arrived() > 0
            )  # a request goes first, but not every time
            if not self._put_off:
                self._score()

    def _enter(self, request: AsyncRequest, only: bool) -> None:
        with self._lock:
            self._expected.only -= only
        self._line.put(request.owner, request)
        if request.owner == self._expected.owner:
            self._expected.until = 0.0

    def _full(self) -> list[str]:
        """The owners who have rows, if what is free is for those who have none."""
        owners = {request.owner for request in self._live.values()}
        needed = self._left_free - (len(owners) - 1)
        return [*owners] if self.rows - len(self._live) <= needed else []

    def _admit(self, request: AsyncRequest) -> None:
        request.number = self.engine.put(request.task)
        request.admitted = time.perf_counter()
        request.started.set_result(None)
        self._live[request.number] = request

    def _step(self) -> None:
        events = self.engine.step()
        # those that have waited for their first tokens are woken first
        told = sorted(
            (event for event in events if event.tokens), key=lambda one: self._live[one.id].first or 0.0
        )
        _wake([self._live[event.id].put(event.tokens) for event in told])
        for event in events:
            if event.generation is not None:
                self._end(self._live.pop(event.id), event.generation, event.error and _told(event.error))

    def _score(self) -> None:
        """Run a chunk of the scoring that is under way, or of the next one."""
        one = self._scored = self._scored or self._scorings.pop()
        done: Any = None
        try:
            if not one.done.cancelled():
                next(one.passes)
                return
            one.passes.close()
        except StopIteration as end:
            done = end.value
        except Exception as error:
            done = _told(error)
        self._scored = None
        self._leave_place(Scoring, one.owner)
        _finish(one, done)
        self._check_drained()

    def _cancel(self, request: AsyncRequest) -> None:
        if request.ended is not None:
            return
        if request.number is None:
            if self._line.remove(request.owner, request):
                self._end(request, request.task.generation(), None)
        elif self._live.pop(request.number, None) is not None:
            self._end(request, self.engine.cancel(request.number), None)

    def _end(self, request: AsyncRequest, generation: Generation | None, error: Exception | None) -> None:
        with self._lock:
            self._open -= 1
        self._leave_place(AsyncRequest, request.owner)
        if request.admitted is not None:
            taken_s = time.perf_counter() - request.admitted
            self._text_s += (taken_s - self._text_s) * (_NEWEST if self._text_s else 1.0)
        request.end(generation, error)
        self._check_drained()

    def _check_drained(self) -> None:
        left = self._open or self._scorings or self._scored
        if self._drained is not None and not left and not self._drained.done():
            self._drained.set_result(None)

    def _end_all(self, error: BaseException | None) -> None:
        """End all requests: the thread ends."""
        left = list(self._live.values())
        self._live.clear()  # before the calls: there is nothing to cancel any more
        with suppress(Empty):
            while True:
                self._calls.get_nowait()()
        while self._line:
            left.append(self._line.pop())
        reason: EngineError
        if error is None:
            reason = ClosedEngineError("the engine was closed before the text was finished")
        else:
            reason = DeadEngineError(_dead(error))
            reason.__cause__ = error
        for request in left:
            self._end(request, request.task.generation(), reason)
        while self._scored or self._scorings:
            one, self._scored = self._scored or self._scorings.pop(), None
            _finish(one, reason)
        self._check_drained()


def _wake(waiting: Iterable[News | None]) -> None:
    """Let readers go on: each event loop is woken once, as each time it would take the interpreter's lock at once."""
    of_loop: dict[asyncio.AbstractEventLoop, list[News]] = {}
    for news in waiting:
        if news is not None:
            of_loop.setdefault(news.get_loop(), []).append(news)
    for loop, some in of_loop.items():
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(_go_on, some)


def _go_on(waiting: Iterable[News]) -> None:
    for news in waiting:
        if not news.done():  # it is told already, or waits no longer
            news.set_result(None)


def _finish(scoring: Scoring[Any], done: Any) -> None:
    with suppress(InvalidStateError):  # its caller has cancelled it
        if isinstance(done, Exception):
            scoring.done.set_exception(done)
        else:
            scoring.done.set_result([] if done is None else done)


def _told(error: Exception) -> Exception:
    """The error that a caller is told: one of its own where memory ran out, for which torch has a plain RuntimeError on
    the CPU."""
    short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if not short and not (isinstance(error, RuntimeError) and "can't allocate memory" in str(error)):
        return error
    failed = NoMemoryError("there is not enough memory for this request now: try again later")
    failed.__cause__ = error
    return failed


def _dead(error: BaseException) -> str:
    return f"the engine has stopped with an error ({type(error).__name__}: {error}): start it again"
