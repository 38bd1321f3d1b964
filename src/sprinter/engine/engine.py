"""The public engine: many requests at once, each with its own settings."""

from __future__ import annotations

from typing import Unpack

from sprinter.decode.checks import at_least
from sprinter.engine.batch import Results
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.engine.pair import Pair
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import PromptInput
from sprinter.engine.scheduler import Event, Scheduler
from sprinter.engine.task import Task
from sprinter.errors import UserError

__all__ = ["Engine"]

_LONGEST = 2048
"""Default length of a row, where the context is not shorter."""


class Engine:
    """Serves many requests at once; a finished one's rows are taken by the next in the queue (continuous batching).

    A text does not depend on what else is served: with the same seed it is that of ``Pair.generate``. (Sums are taken
    in another order, so that in float32 and bfloat16 texts may part where two tokens are as good as tied.)

    Times in a request's stats: the time of a forward pass is shared equally by the rows in it. ``wall_s`` runs from
    when the request takes its rows to its end, while the engine steps, so that ``other_s`` includes the time in which
    other requests were served. A method that drafts several texts takes as many rows. Not thread-safe.

    Args:
        pair: what to generate with.
        rows: number of rows in the caches, which are allocated once; an upper bound on concurrent requests.
        policy: when the target's forward pass is run.
        max_len: length of a row in tokens, prompt included; None: the larger context of the two models, at most 2,048.
        memory_bytes: upper bound of the caches' size; None: nine tenths of the free memory.

    Raises:
        UserError: rows that do not fit, with the largest number that does; a model that decodes one row at a time.
    """

    def __init__(
        self,
        pair: Pair,
        rows: int = 8,
        policy: Policy = Policy(),
        max_len: int | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        most = pair.models.longest
        longest = min(most, _LONGEST) if max_len is None else max_len
        at_least("max_len", longest, 1)
        if longest > most:
            raise UserError(f"max_len={max_len!r} is out of range: give 1 to {most} tokens")
        self._pair, self._rows, self._longest = pair, rows, longest
        self._batch = Scheduler(pair._parts, rows, longest, policy, memory_bytes)
        self._results = Results(self._batch)

    def __repr__(self) -> str:
        return f"Engine({self._rows} rows of {self._longest} tokens, {self.unfinished} requests unfinished)"

    @property
    def unfinished(self) -> int:
        """Number of requests that are queued or active."""
        return self._batch.unfinished

    def add(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> int:
        """Put a request in the queue.

        Args:
            prompt: text, or token ids.
            options, keywords: as of ``Pair.generate``; ``max_new_tokens=None`` is to the end of the row.

        Returns:
            The number of the request.

        Raises:
            UserError: what is wrong with the request and how to fix it.
        """
        asked = GenerationOptions.of(options, keywords)
        return self._batch.add(Task(self._pair._parts, prompt, asked, self._longest))

    def step(self) -> list[Event]:
        """Advance all requests by a step, with at most one forward pass of each kind.

        An error of one request ends that request alone; its event holds the error. An exception raised here belongs to
        no request (an interrupt, out of memory): all are as they were before that forward pass, and the next step
        continues.

        Returns:
            An event for each request that has new tokens or has ended.
        """
        return self._batch.step()

    def finish(self) -> dict[int, Generation]:
        """Step until no request is left; the results, by number, of the requests that end from now on.

        If it is interrupted, call it again: no result is lost.

        Raises:
            BatchError: some requests failed; it holds the results of all.
        """
        return self._results.all("request")

    def cancel(self, id: int) -> Generation:
        """Cancel a request, queued or active; its rows are free at once.

        Returns:
            The result so far, ``finish_reason`` "cancelled".

        Raises:
            UserError: there is no such request, or it is finished.
        """
        return self._batch.cancel(id)

    def close(self) -> None:
        """Cancel all requests and release the caches."""
        self._batch.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
