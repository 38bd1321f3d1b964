"""The public engine for asyncio: many requests at once, submitted from any task."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.decode.draft import Token
from sprinter.engine.astream import AsyncStream
from sprinter.engine.engine import Engine
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.engine.pair import Pair
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import PromptInput
from sprinter.engine.scoring import ScoredToken, Scorer
from sprinter.engine.worker import AsyncRequest, EngineWorker
from sprinter.models.memory import cache_bytes

__all__ = ["AsyncEngine", "EngineStream", "RequestTimes"]


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a request in seconds since it was submitted; None: not yet.

    Attributes:
        admitted_s: it got its rows. first_token_s: its first tokens were final. ended_s: it ended.
    """

    admitted_s: float | None
    first_token_s: float | None
    ended_s: float | None


class AsyncEngine:
    """An ``Engine`` in a thread of its own, for asyncio; requests come and go at any time (continuous batching).

    A text is that of ``Pair.generate`` with the same options (see ``Engine``). Cancelling the task that reads a stream,
    closing or dropping the stream frees its rows before the next step. A request that fails, fails alone. If the engine
    itself fails, every open request and every later one raises a ``DeadEngineError``.

        async with sprinter.AsyncEngine(pair) as engine:
            async for token in engine.stream("The river rises in", seed=1):
                print(token.text, end="")

    ``stream`` and ``close`` may be called in any thread, streams be read in any event loop.

    Args:
        pair: what to generate with.
        rows, policy, max_len, memory_bytes: as for ``Engine``.
        max_waiting: maximum number of requests that wait for rows; further ones raise a ``QueueFullError``.
        shared_queue: whether an owner may have at most as many requests waiting as there are free places left, so that
            none fills the queue for all.
        shared_rows: number of other owners for each of whom a row is left free, up to half of the rows, so that a text
            of theirs does not wait for another's to end.
        shared_prefixes: whether owners reuse KV caches of each other: what one has sent, another may tell by the time.
        on_death: called in the engine's thread, with the error, if the engine fails.

    Raises:
        UserError: as for ``Engine``.
    """

    def __init__(
        self,
        pair: Pair,
        rows: int = 8,
        policy: Policy = Policy(),
        max_len: int | None = None,
        memory_bytes: int | None = None,
        *,
        max_waiting: int = 64,
        shared_queue: bool = False,
        shared_rows: int = 0,
        shared_prefixes: bool = False,
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        at_least("max_waiting", max_waiting, 0)
        self._engine = Engine(pair, rows, policy, max_len, memory_bytes)
        self._shared_prefixes = shared_prefixes
        # of a given text each token has logits, which cost about half of what the other layers do in small models
        self._scorer = Scorer(pair.models, self._engine.max_len, max(1, 2 * policy.prompt_piece // 3))
        self._worker = EngineWorker(self._engine, rows, max_waiting, on_death, shared_queue, shared_rows)
        self._finalizer = weakref.finalize(self, self._worker.close)

    def __repr__(self) -> str:
        return f"Async{self._engine!r}"

    @property
    def rows(self) -> int:
        """Maximum number of requests that are served at the same time."""
        return self._worker.rows

    @property
    def max_len(self) -> int:
        """Length of a row in tokens, prompt included."""
        return self._engine.max_len

    @property
    def unfinished(self) -> int:
        """Number of requests that have not ended."""
        return self._worker.open

    @property
    def waiting(self) -> int:
        """Number of requests that wait for rows."""
        return self._worker.waiting

    @property
    def held(self) -> float:
        """Share of the rows' slots that hold tokens of texts, 0 to 1."""
        return self._engine.held

    @property
    def cache_bytes(self) -> int:
        """Size of the rows' caches, which grow to it."""
        rows, models = self._engine._models, self._engine._runtime.models
        each = ((rows.target, models.target), (rows.draft, models.draft))
        used = [(one.runner, of.model) for one, of in each if one is not None and of is not None]
        return sum(runner.batch * cache_bytes(model, runner.max_len) for runner, model in used)

    @property
    def closing(self) -> bool:
        """Whether no more requests are taken."""
        return self._worker.closing

    @property
    def error(self) -> BaseException | None:
        """The error that the engine has failed with; None: it has not."""
        return self._worker.error

    def stream(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        *,
        owner: str = "",
        **keywords: Unpack[GenerationKeywords],
    ) -> EngineStream:
        """Submit a request. Its prompt is encoded here: a server calls this in another thread than its event loop's.

        Args:
            prompt, options, keywords: as for ``Engine.add``.
            owner: requests of different owners that wait for rows take turns, and reuse no KV caches of each other
                (but with ``shared_prefixes``).

        Raises:
            UserError: what is wrong with the request and how to fix it.
            EngineError: the queue is full, the engine is closed or has failed.
        """
        salt = "" if self._shared_prefixes else None
        task = self._engine._task(
            prompt, GenerationOptions.of(options, keywords), self._worker.open, owner, salt
        )
        request = AsyncRequest(task, owner)
        self._worker.submit(request)
        return EngineStream(self, request)

    async def generate(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        *,
        owner: str = "",
        **keywords: Unpack[GenerationKeywords],
    ) -> Generation:
        """Generate a text; arguments and errors as for ``stream``, and those of ``AsyncStream.read``."""
        async with self.stream(prompt, options, owner=owner, **keywords) as stream:
            return await stream.finish()

    def expect(self, owner: str) -> Callable[[], None]:
        """Begin no pass of others before a request of an owner, who has no other, is put, or for ten milliseconds; what
        is returned is to be called when none will be put."""
        return self._worker.expect(owner)

    def check_room(self, owner: str, count: int) -> None:
        """Refuse requests that would not be taken, before they are made.

        Raises:
            EngineError: the queue has no room for so many of this owner, the engine is closed or has failed.
        """
        self._worker.check_room(owner, count)

    @property
    def wait_s(self) -> float:
        """Time until the requests that wait now will have got rows, at the pace of the last ones; 0: not known."""
        return self._worker.wait_s

    async def score(self, ids: Sequence[int], top: int = 0, *, owner: str = "") -> list[ScoredToken]:
        """Log-probabilities of given tokens under the target's raw law, between the steps of the other requests.

        Args:
            ids: token ids of a text, at most ``max_len``.
            top: number of most probable tokens to name at each position.
            owner: as for ``stream``.

        Returns:
            One for each token but the first, which follows nothing.

        Raises:
            UserError: token ids out of range, a text that is too long.
            EngineError: the engine is closed or has failed, or there is no memory.
            SprinterError: the target's logits are not finite.
        """
        scoring = self._scorer.scoring(ids, top, owner)
        self._worker.score(scoring)
        return await asyncio.wrap_future(scoring.done)

    def unread(self, ids: Sequence[int], start: int, owner: str = "") -> int:
        """Number of tokens that ``laws`` would read now."""
        return self._scorer.unread(ids, start, owner)

    async def laws(self, ids: Sequence[int], start: int, *, owner: str = "") -> Tensor:
        """The target's raw laws behind each token of a text from ``start`` on, between the steps of other requests.

        What the text shares with an earlier one of this owner is not read again.

        Returns:
            Logarithms of the laws, ``[len(ids) - start, V]`` float32.

        Raises:
            UserError: as for ``score``; a ``start`` that is not in the text.
            EngineError, SprinterError: as for ``score``.
        """
        scoring = self._scorer.laws(ids, start, owner)
        self._worker.score(scoring)
        return await asyncio.wrap_future(scoring.done)

    async def drain(self) -> None:
        """Take no more requests, and wait until all have ended."""
        await asyncio.shield(asyncio.wrap_future(self._worker.drain()))

    async def aclose(self) -> None:
        """Cancel all requests, release the caches and end the thread."""
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """As ``aclose``, from synchronous code; waits for the step that is under way."""
        self._finalizer()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class EngineStream(AsyncStream):
    """The tokens of a request of an ``AsyncEngine``, in lists of those that a step made.

    Attributes:
        begun: called when tokens are read.
    """

    def __init__(self, engine: AsyncEngine, request: AsyncRequest) -> None:
        super().__init__()
        self._engine = engine  # it stays open as long as its streams are in use
        self._worker = worker = engine._worker
        self._request, self._raised = request, False
        self.begun: Callable[[], None] | None = None
        self._dropped = weakref.finalize(self, worker.cancel, request)
        self._dropped.atexit = False

    def __repr__(self) -> str:
        state = "unfinished" if self.generation is None else self.generation.finish_reason
        return f"EngineStream({self._request.task.method.name}, {state})"

    @property
    def request(self) -> GenerationOptions:
        """The options as they are used, with all defaults filled in."""
        return self._request.task.options

    @property
    def prompt_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self._request.task.prompt_ids

    @property
    def times(self) -> RequestTimes:
        """When it got rows, wrote its first tokens, and ended."""
        made = self._request
        since = (None if at is None else at - made.queued for at in (made.admitted, made.first, made.ended))
        return RequestTimes(*since)

    @property
    def generation(self) -> Generation | None:
        return self._request.generation

    async def started(self) -> None:
        """Wait until the request has rows, or has ended; may be cancelled without consequences for it."""
        await asyncio.shield(asyncio.wrap_future(self._request.started))

    async def read(self) -> list[Token]:
        try:
            tokens = await self._request.read()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.begun is not None:
            self.begun()
        if not tokens and self._request.error is not None and not self._raised:
            self._raised = True
            raise self._request.error
        return tokens

    def cancel(self) -> None:
        """As ``aclose``, without waiting."""
        self._worker.cancel(self._request)

    async def aclose(self) -> None:
        self.cancel()
        await asyncio.shield(asyncio.wrap_future(self._request.over))
