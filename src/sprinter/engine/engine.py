"""The public engine: many requests at once, each with its own settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from sprinter.decode.checks import at_least
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.engine.generation import Generation, Request
from sprinter.engine.policy import Policy
from sprinter.engine.scheduler import Event, Scheduler
from sprinter.engine.task import Task
from sprinter.errors import BatchError, RowsError, UserError

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair

__all__ = ["Engine", "generate_all", "of_prompt"]

_LONGEST = 2048
"""Default length of a row, where the context is not shorter."""
_MOST_ROWS = 32
"""Rows of ``generate_batch``, where no number is given."""


class Engine:
    """Serves many requests at once; a finished one's rows are taken by the next in the queue (continuous batching).

    A text does not depend on what else is served: with the same seed it is that of ``Pair.generate``. (Sums are taken
    in another order, so that in float32 and bfloat16 texts may part where two tokens are as good as tied.)

    Times in a request's stats: a pass's time is shared equally by the rows that took part in it; ``wall_s`` runs from
    when the request takes its rows until its end, while the engine steps, so that ``other_s`` holds the time in which
    others were served. A method that drafts several texts takes as many rows. Not for use by several threads.

    Args:
        pair: what to generate with.
        rows: rows of the caches, made once; so many requests are under way at most.
        policy: when the target's pass is run.
        max_len: tokens that a row holds, prompt included; None: the larger context of the two models, at most 2,048.
        memory_bytes: what the caches may take; None: nine tenths of the free memory.

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
        self._results = _Results(self._batch)

    def __repr__(self) -> str:
        return f"Engine({self._rows} rows of {self._longest} tokens, {self.unfinished} requests unfinished)"

    @property
    def unfinished(self) -> int:
        """Requests that wait or are under way."""
        return self._batch.unfinished

    def add(
        self,
        prompt: str | Sequence[int],
        *,
        method: str | Method | None = None,
        max_new_tokens: int | None = 64,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = (),
        stop_token_ids: int | Sequence[int] | None = (),
        meter: Literal["running", "complete"] = "running",
        ahead: int | Literal["auto"] = 1,
        rules: RuleState | Mapping[str, Any] | None = None,
    ) -> int:
        """Put a request in the queue; its number. Arguments as of ``Pair.generate``; ``max_new_tokens=None``
        is to the end of the row.

        Raises:
            UserError: what is wrong with the request and how to mend it.
        """
        request = Request.make(
            self._pair.default_method if method is None else method, max_new_tokens, temperature, top_k, top_p, min_p,
            seed, stop, meter, ahead, rules, stop_token_ids,
        )  # fmt: skip
        return self._batch.add(Task(self._pair._parts, prompt, request, self._longest))

    def step(self) -> list[Event]:
        """Serve all requests a step further: at most one pass of each kind. What came of it, request by request.

        An error of one request ends that one alone, and its event tells. What is raised here belongs to none of them
        (an interrupt, no memory for a pass): they are as they were before that pass, and the next step goes on.
        """
        return self._batch.step()

    def finish(self) -> dict[int, Generation]:
        """Step until no request is left; the results by number, of those that end from now on.

        If it is interrupted, call it again: no result is lost.

        Raises:
            BatchError: some requests failed; it holds the results of all.
        """
        return self._results.all("request")

    def cancel(self, id: int) -> Generation:
        """Abandon a request, whether it waits or is under way; its rows are free at once.

        Returns:
            The result so far, ``finish_reason`` "cancelled".

        Raises:
            UserError: there is no such request, or it is finished.
        """
        return self._batch.cancel(id)

    def close(self) -> None:
        """Abandon all requests and give the caches back."""
        self._batch.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def generate_all(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    requests: Sequence[Request],
    rows: int | None,
    policy: Policy,
    memory_bytes: int | None,
) -> list[Generation]:
    """All texts, in the order of the prompts; see ``Pair.generate_batch``."""
    runs = []
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        with of_prompt(i):
            runs.append(Task(pair._parts, prompt, request))
    if not runs:
        return []
    wanted = min(len(runs), _MOST_ROWS)
    batch = Scheduler(
        pair._parts,
        wanted if rows is None else rows,
        max(run.length for run in runs),
        policy,
        memory_bytes,
        needs_target=any(run.needs_target for run in runs),
        needs_draft=any(run.needs_draft for run in runs),
        tells=False,
        spare=max(run.spare for run in runs),
    )
    try:
        for i, run in enumerate(runs):  # as a batch numbers its requests
            with of_prompt(i):
                batch.add(run)
        done = _Results(batch).all("prompt")
    finally:
        batch.close()
    return [done[i] for i in range(len(runs))]


class _Results:
    """What comes of a batch's requests, kept until it is asked for as a whole."""

    def __init__(self, batch: Scheduler) -> None:
        self._batch = batch
        self._last: dict[int, Event] = {}

    def all(self, what: str) -> dict[int, Generation]:
        """Step until no request is left; see ``Engine.finish``. ``what``: a request's name in an error."""
        batch = self._batch
        while batch.unfinished or batch.told:
            batch.advance()
            self._last |= {event.id: event for event in batch.told if event.generation is not None}
            batch.told.clear()  # not before it is kept here: an interrupt may come at any time
        last = sorted(self._last.items())
        results = {id: event.generation for id, event in last if event.generation is not None}
        errors = {id: event.error for id, event in last if event.error is not None}
        # Handed over and forgotten in one line: an interrupt before it leaves all to the next call.
        if not errors:
            return (results, self._last.clear())[0]  # type: ignore[func-returns-value]
        done = {id: result for id, result in results.items() if id not in errors}
        failed = BatchError(what, errors, done, {id: results[id] for id in errors})
        raise (failed, self._last.clear())[0] from next(iter(errors.values()))  # type: ignore[func-returns-value]


@contextmanager
def of_prompt(i: int) -> Iterator[None]:
    """Errors of one request among many say whose they are."""
    try:
        yield
    except RowsError as error:
        raise RowsError(f"prompt {i}: {error}") from error
    except UserError as error:
        raise UserError(f"prompt {i}: {error}") from error
