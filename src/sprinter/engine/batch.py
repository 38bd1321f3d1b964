"""Many requests at once: one engine, a fixed number of rows, requests that come and go (continuous batching).

Each request is a stream of jobs (``Run.jobs``). A step of the engine does at most one pass of each kind, for all
requests whose next job is of that kind: a piece of the waiting prompts in each model (prompts of unlike length apart),
a draft step, and the target's pass, which a policy may hold back until it pays. Rows are at different lengths and
phases, each with its own method, sampling and seed; what a row writes does not depend on its neighbours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sprinter.decode.checks import at_least
from sprinter.decode.draft import Token
from sprinter.engine.driver import DraftJob, Job, Jobs, PromptJob, TargetJob
from sprinter.engine.generation import Generation
from sprinter.engine.policy import Policy
from sprinter.engine.run import Parts, Run
from sprinter.engine.stream import Reader
from sprinter.errors import UserError
from sprinter.models.choose import runner_kind
from sprinter.models.memory import check_memory

__all__ = ["Batch", "Event"]


@dataclass(frozen=True, slots=True)
class Event:
    """What a step of the engine brought one request.

    Attributes:
        id: the request's.
        tokens: new final tokens, each with the text that became certain with it, as in ``Stream``.
        generation: the whole result, if the request is finished.
    """

    id: int
    tokens: list[Token]
    generation: Generation | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has rows.

    Attributes:
        numbers: its rows. job: what must be done next. since: the engine's step in which it began to wait for that.
    """

    id: int
    run: Run
    numbers: list[int]
    jobs: Jobs
    job: Job | None
    reader: Reader | None
    since: int
    began: float

    def news(self) -> list[Token]:
        """Tokens that nobody was told of."""
        return self.reader.read() if self.reader else []


class Batch:
    """Rows of both models, and the requests that are served in them.

    Args:
        parts: the pair's.
        rows: rows that both models have.
        max_len: the most tokens, prompt and text together, that a row can hold.
        policy: when the target's pass is run.
        memory_bytes: what the caches may take; None: nine tenths of what is free.
        needs_target, needs_draft: whether any request may ask the model: no cache is made for one that is never asked.
        tells: whether events tell of tokens as they come; else of finished requests alone.

    Raises:
        UserError: a model that decodes one row at a time; caches that do not fit, with the largest number of rows.
    """

    def __init__(
        self,
        parts: Parts,
        rows: int,
        max_len: int,
        policy: Policy,
        memory_bytes: int | None = None,
        needs_target: bool = True,
        needs_draft: bool = True,
        tells: bool = True,
    ) -> None:
        self._parts, self._policy, self._max_len, self._rows = parts, policy, max_len, rows
        at_least("rows", rows, 1)
        loaded = [parts.models.target] * needs_target + [parts.models.draft] * needs_draft
        models = [one.model for one in loaded if one is not None]
        for model in models:
            kind, reason = runner_kind(model)
            if rows > 1 and kind == "crop":
                name = type(model).__name__
                raise UserError(f"{name} decodes one row at a time ({reason}): use rows=1")
        check_memory(models, rows, parts.targets.size(max_len), memory_bytes)
        self._models = parts.take(max_len, rows, needs_target, needs_draft)
        self._free = list(range(rows))
        self._waiting: deque[tuple[int, Run]] = deque()
        self._live: dict[int, _Live] = {}
        self._next_id = self._steps = 0
        self._tells, self._closed = tells, False

    @property
    def unfinished(self) -> int:
        """Requests that wait or are under way."""
        return len(self._waiting) + len(self._live)

    def add(self, run: Run) -> int:
        """Put a request in the queue; its number.

        Raises:
            UserError: it can never fit.
        """
        if self._closed:
            raise UserError("the engine is closed: make another")
        if run.rows > self._rows:
            raise UserError(
                f"method {run.request.method.name} needs {run.rows} rows, and the engine has {self._rows}: "
                f"give rows={run.rows} or more, or fewer drafts"
            )
        if run.length > self._max_len:
            raise UserError(
                f"prompt and new tokens are {run.length} tokens, and a row of the engine holds {self._max_len}: "
                f"give max_len={run.length} or more, or a smaller max_new_tokens"
            )
        id, self._next_id = self._next_id, self._next_id + 1
        self._waiting.append((id, run))
        return id

    def step(self) -> list[Event]:
        """Let waiting requests take free rows, do one pass of each kind that is due, and tell what came of it.

        Raises:
            SprinterError: a model's logits are not finite. The requests stay as they were before that pass.
        """
        began = time.perf_counter()
        events = self._admit()
        self._steps += 1
        for kind in ("target", "draft"):
            reads = self._at(lambda job, kind=kind: isinstance(job, PromptJob) and job.model == kind)  # type: ignore[misc]
            events += self._do(reads, began)
        events += self._do(self._at(lambda job: isinstance(job, DraftJob)), began)
        waiting = self._at(lambda job: isinstance(job, TargetJob))
        oldest = max((self._steps - one.since for one in waiting), default=0)
        # One that was asked for in this very step may come along.
        if waiting and self._policy.calls(len(waiting), len(self._live), oldest):
            events += self._do(waiting, began)
        now = time.perf_counter()
        for one in self._live.values():
            one.run.record.stats.wall_s += now - max(one.began, began)
        return _joined(events)

    def cancel(self, id: int) -> Generation:
        """Abandon a request, whether it waits or is under way; its rows are free at once.

        Returns:
            The result so far, ``finish_reason`` "cancelled".

        Raises:
            UserError: there is no such request, or it is finished.
        """
        if id in self._live:
            one = self._live[id]
            self._leave(one)
            return one.run.generation()
        for entry in self._waiting:
            if entry[0] == id:
                self._waiting.remove(entry)
                return entry[1].generation()
        raise UserError(f"request {id} is not under way: it is finished, cancelled or was never added")

    def close(self) -> None:
        """Abandon all requests and give the caches back."""
        if self._closed:
            return
        self._closed = True
        for one in list(self._live.values()):
            self._leave(one)
        self._waiting.clear()
        self._parts.give_back(self._models)

    def _admit(self) -> list[Event]:
        """First come, first served: the first in the queue waits until there are rows enough for it."""
        events = []
        while self._waiting and self._waiting[0][1].rows <= len(self._free):
            id, run = self._waiting.popleft()
            numbers, self._free = self._free[: run.rows], self._free[run.rows :]
            jobs = run.jobs(self._models, numbers, self._policy.prompt_piece)
            began = time.perf_counter()
            reader = Reader(run) if self._tells else None
            one = _Live(id, run, numbers, jobs, None, reader, self._steps, began)
            self._live[id] = one
            events.append(self._go_on(one, None, began))
        return events

    def _at(self, wanted: Callable[[Job | None], bool]) -> list[_Live]:
        """Requests whose next job is such a one, in the order of their rows."""
        return sorted((one for one in self._live.values() if wanted(one.job)), key=lambda one: one.numbers)

    def _do(self, group: Sequence[_Live], began: float) -> list[Event]:
        """One pass for all of them."""
        if not group:
            return []
        done = self._models.run([one.job for one in group if one.job is not None])
        events, error = [], None
        for one, result in zip(group, done, strict=True):
            try:
                events.append(self._go_on(one, result, began))
            except Exception as caught:  # a rule's own; the others' rows have read on and must hear of it
                error = error or caught
        if error is not None:
            raise error
        return events

    def _go_on(self, one: _Live, done: object, began: float) -> Event:
        """Send a request what was done for it, up to its next job."""
        try:
            one.job = one.jobs.send(done)
            one.since = self._steps
            return Event(one.id, one.news())
        except StopIteration:
            one.run.record.stats.wall_s += time.perf_counter() - max(one.began, began)
            news = one.news()
            self._leave(one)
            return Event(one.id, news, one.run.generation())
        except BaseException:
            self._leave(one)
            raise

    def _leave(self, one: _Live) -> None:
        """Free the rows of a request."""
        one.jobs.close()
        for rows in (self._models.target, self._models.draft):
            for number in one.numbers if rows else ():
                assert rows is not None
                rows.rewind(number, 0)
        del self._live[one.id]
        self._free = sorted([*self._free, *one.numbers])


def _joined(events: Sequence[Event]) -> list[Event]:
    """One event a request, those that say nothing left out."""
    joined: dict[int, Event] = {}
    for event in events:
        if event.id in joined:
            event = Event(event.id, joined[event.id].tokens + event.tokens, event.generation)
        if event.tokens or event.generation:
            joined[event.id] = event
    return list(joined.values())
