"""Continuous batching: requests enter and leave a fixed number of rows.

Each request is a generator of jobs (``Task.jobs``). A step runs at most one forward pass of each kind, for all requests
whose next job is of that kind: a prefill chunk in each model (grouped by length), a draft step, and the target's
forward pass, which a policy may delay until enough rows wait. Rows differ in length and phase, and each has its own
method, sampling and seed; the text of a row does not depend on other rows, but with ``never_slower``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sprinter.decode.checks import at_least
from sprinter.decode.draft import Token
from sprinter.decode.switch import PassShare, Tracker
from sprinter.engine.generation import Generation
from sprinter.engine.jobs import Done, DraftJob, Job, PromptJob, TargetJob, TreeJob
from sprinter.engine.parts import Parts
from sprinter.engine.policy import Policy
from sprinter.engine.shares import pass_shares
from sprinter.engine.stream import TokenReader
from sprinter.engine.task import Task
from sprinter.engine.work import Work
from sprinter.errors import ContextLengthError, RowsError, UserError
from sprinter.models.choose import pads_rows, runner_kind

__all__ = ["Event", "Scheduler"]


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens, or the end, of one request after a step of the engine.

    Attributes:
        id: number of the request.
        tokens: new final tokens, each with the text that it completes, as in ``Stream``.
        generation: the whole result, if the request has ended; its ``finish_reason`` is "error" if it failed.
        error: the exception, if it failed: logits that are not finite, or an exception of one of its rules.
    """

    id: int
    tokens: list[Token]
    generation: Generation | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Live:
    """A request that has rows.

    Attributes:
        began: time at which it got its rows, in seconds.
        passed_over: number of steps for which it has waited for the target.
    """

    id: int
    work: Work
    reader: TokenReader | None
    began: float
    passed_over: int = 0


class Scheduler:
    """The rows of both models and the requests that are decoded in them.

    Args:
        parts: models, heads and caches of the pair.
        rows: number of rows in each model.
        max_len: length of a row in tokens, prompt and text together.
        policy: when the target's forward pass is run.
        memory_bytes: maximum size of the caches; None: 90 % of the free memory, idle caches included.
        needs_target, needs_draft: whether any request may use the model; no caches are allocated for an unused one.
        spare: additional slots of a row, for a tree.
        streams: whether to emit events for new tokens, or only for finished requests.

    Raises:
        UserError: a model that decodes one row at a time; caches that do not fit, with the largest number of rows.

    Attributes:
        events: events that ``step`` has not returned yet.
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
        streams: bool = True,
        spare: int = 0,
    ) -> None:
        self._parts, self._policy, self._max_len, self._rows = parts, policy, max_len, rows
        at_least("rows", rows, 1)
        if memory_bytes is not None:
            at_least("memory_bytes", memory_bytes, 0)
        if not isinstance(policy, Policy):
            raise UserError(f"policy={policy!r} is no policy: give sprinter.Policy(...), or leave it out")
        loaded = [parts.models.target] * needs_target + [parts.models.draft] * needs_draft
        models = [one.model for one in loaded if one is not None]
        for model in models:
            kind, reason = runner_kind(model)
            if rows > 1 and kind == "crop":
                name = type(model).__name__
                raise RowsError(f"{name} decodes one row at a time ({reason}): use rows=1")
        parts.check_memory(max_len, rows, needs_target, needs_draft, memory_bytes, spare)
        self._models = parts.take(max_len, rows, needs_target, needs_draft, spare)
        self._waiting: dict[int, Task] = {}
        self._live: dict[int, _Live] = {}
        self.events: list[Event] = []
        self._next_id = 0
        self._streams, self._closed, self._spare = streams, False, spare
        self._trackers: dict[Any, Tracker] = {}
        both = parts.models.target, parts.models.draft
        self._pads = tuple(one is not None and pads_rows(one.model) for one in both)
        self._order = list(range(rows))  # rows in the order in which they were last freed

    @property
    def unfinished(self) -> int:
        """Number of requests that are queued or active."""
        return len(self._waiting.keys() | self._live.keys())

    @property
    def _free(self) -> list[int]:
        taken = {one.work.number for one in self._live.values()}
        return [number for number in range(self._rows) if number not in taken]

    def add(self, run: Task) -> int:
        """Put a request in the queue; returns its number.

        Raises:
            UserError: the request is longer than a row, or the engine is closed.
        """
        if self._closed:
            raise UserError("the engine is closed: make another")
        self.check(run)
        if self._rows > 1:
            run.share(self._trackers, lambda: len(self._live))
        id, self._next_id = self._next_id, self._next_id + 1
        self._waiting[id] = run
        return id

    def check(self, run: Task) -> None:
        """Refuse a request that does not fit a row.

        Raises:
            UserError: it is longer than a row, or its tree is.
        """
        if run.spare > self._spare:
            raise UserError(
                f"method {run.method.name} drafts a tree with {run.spare} tokens beside the text, and a row of the "
                f"engine has room for {self._spare}: give a smaller gamma or tree, or fewer drafts"
            )
        if run.length > self._max_len:
            raise ContextLengthError(
                f"prompt and new tokens are {run.length} tokens, and a row of the engine holds {self._max_len}: "
                f"give max_len={run.length} or more, or a smaller max_new_tokens"
            )

    def step(self) -> list[Event]:
        """Run ``advance`` and return the events."""
        self.advance()
        events, self.events = self.events, []
        return events

    def advance(self) -> None:
        """Admit queued requests to free rows, run one forward pass of each kind that is due, and collect the events.

        An error in one request ends only that request; its event holds the error. An exception raised here concerns no
        single request (an interrupt, out of memory): all requests keep their state from before the forward pass, no
        event is lost, and the next step continues.
        """
        began = time.perf_counter()
        try:
            self._admit()
            for one in self._live.values():
                if not one.work.begun:
                    self._go_on(one, None, began)
            for model in ("target", "draft"):
                reads = self._at(lambda job, model=model: isinstance(job, PromptJob) and job.model == model)  # type: ignore[misc]
                self._do(reads, began)
            self._do(self._at(lambda job: isinstance(job, DraftJob)), began)
            self._do(self._at(lambda job: isinstance(job, TreeJob)), began)
            waiting = self._at(lambda job: isinstance(job, TargetJob))
            longest = max((one.passed_over for one in waiting), default=0)
            under_way = sum(not one.work.over for one in self._live.values())
            # Requests that need the target since this step take part.
            if waiting and self._policy.calls(len(waiting), under_way, longest):
                self._do(waiting, began)
            else:
                for one in waiting:
                    one.passed_over += 1
        finally:
            now = time.perf_counter()
            for one in self._live.values():
                if not one.work.over:
                    one.work.run.record.stats.wall_s += now - max(one.began, began)
        self._collect()

    def cancel(self, id: int) -> Generation:
        """Cancel a request, queued or active; its rows are freed at once.

        Returns:
            The result so far, with ``finish_reason`` "cancelled".

        Raises:
            UserError: there is no such request, or it has ended.
        """
        run = self._waiting.pop(id, None)
        if id in self._live:
            run = self._live[id].work.run
            self._leave(self._live[id])
        if run is None:
            raise UserError(f"request {id} is not under way: it is finished, cancelled or was never added")
        return run.generation()

    def close(self) -> None:
        """Cancel all requests and release the caches."""
        if self._closed:
            return
        self._closed = True
        self._live.clear()
        self._waiting.clear()
        self._parts.give_back(self._models)

    def _admit(self) -> None:
        """Admit requests in the order of the queue, as long as rows are free."""
        for id, run in list(self._waiting.items()):
            free = self._free
            if id not in self._live:  # it is there already after an interrupt between the next two statements
                if not free:
                    return
                number = self._best(free, run)
                for rows in (self._models.target, self._models.draft):
                    if rows is not None:
                        rows.owners[number] = run.owner
                work = Work(run, self._models, number, self._policy.prompt_piece)
                reader = TokenReader(run) if self._streams else None
                self._live[id] = _Live(id, work, reader, time.perf_counter())
            del self._waiting[id]

    def _best(self, free: Sequence[int], run: Task) -> int:
        """The row whose earlier text this one continues; else the one that has been free longest."""
        rows = self._models.target or self._models.draft
        oldest_first = [number for number in self._order if number in free]
        return oldest_first[0] if rows is None else rows.best_row(oldest_first, run.prefix, run.owner)

    def _at(self, wanted: Callable[[Job | None], bool]) -> list[_Live]:
        """Requests whose next job satisfies the predicate, in the order of their rows."""
        return sorted(
            (one for one in self._live.values() if wanted(one.work.job)), key=lambda one: one.work.number
        )

    def _do(self, group: Sequence[_Live], began: float) -> None:
        """Run one forward pass for the jobs of a group, and pass on the results."""
        jobs = [one.work.job for one in group if one.work.job is not None]
        done = self._models.run(jobs) if jobs else []
        charged = any(one.work.run.charged is not None for one in group)
        shares: list[list[PassShare]] = pass_shares(jobs, *self._pads) if charged else [[]] * len(jobs)
        for one, result, share in zip(group, done, shares, strict=True):
            one.work.run.passed(share)
            self._go_on(one, result, began)

    def _go_on(self, one: _Live, done: Done | None, began: float) -> None:
        """Send a request the result of its job; it runs up to its next job."""
        one.work.go_on(done)
        one.passed_over = 0
        if one.work.over:
            one.work.run.record.stats.wall_s += time.perf_counter() - max(one.began, began)

    def _collect(self) -> None:
        """Collect the events of all requests, and remove those that have ended."""
        for one in list(self._live.values()):
            if one.work.over:
                self._leave(one, one.work.run.generation())
            else:
                self._note(one)

    def _leave(self, one: _Live, generation: Generation | None = None) -> None:
        """Free the rows of a request; emit its last event if a result is given."""
        for rows in (self._models.target, self._models.draft):
            if rows is not None:
                rows.end_text(one.work.number, one.work.run.text_ids)
        self._order = [*(row for row in self._order if row != one.work.number), one.work.number]
        if generation is None:
            del self._live[one.id]
        else:
            self._note(one, generation)

    def _note(self, one: _Live, generation: Generation | None = None) -> None:
        """Append the event of a request once; after an interrupt before that, the next step appends it."""
        place = one.reader and one.reader.place
        try:
            if generation is not None:
                del self._live[one.id]
            tokens = one.reader.read() if one.reader else []
            if tokens or generation is not None:
                self.events.append(Event(one.id, tokens, generation, one.work.error))
        except BaseException:
            self._live[one.id] = one
            if one.reader and place:
                one.reader.place = place
            raise
