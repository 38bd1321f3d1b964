"""Continuous batching: requests enter and leave a fixed number of rows.

A step runs at most one forward pass of each kind, for all requests whose next input is of that kind: a prefill chunk in
each model (grouped by length; a policy may limit how much is read), a draft step, and the target's forward pass, which
a policy may delay until enough rows wait. Rows differ in length and phase, and each has its own method, sampling and
seed; the text of a row does not depend on other rows, but with ``never_slower``.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import Any

from sprinter.decode.checks import at_least
from sprinter.decode.draft import AskGrammar, Token
from sprinter.decode.switch import Tracker
from sprinter.engine.backends.base import DraftRow, PassInput, PromptRow, TargetRow, TreeRow
from sprinter.engine.backends.cuda_graph import draws_alone
from sprinter.engine.executor import RequestRun
from sprinter.engine.generation import Generation
from sprinter.engine.policy import Policy
from sprinter.engine.prompts import NEW, ChunkTurn, choose_prompts
from sprinter.engine.request import Request
from sprinter.engine.runtime import PairRuntime
from sprinter.engine.stream import TokenReader, advance
from sprinter.errors import BatchError, ContextLengthError, RowsError, UserError
from sprinter.models.choose import pads_rows, runner_kind

__all__ = ["Event", "Scheduler"]

_PATIENCE, _POLL = 0.005, 0.001
"""Seconds for which all rows wait for their grammars, and after which they look whether a request has arrived."""


@dataclass(frozen=True, slots=True)
class Event:
    """New tokens, or the end, of one request after a step of the engine.

    Attributes:
        id: number of the request.
        tokens: new final tokens, each with the text that it completes, as in ``Stream``.
        generation: the whole result, if the request has ended; its ``finish_reason`` is "error" if it failed.
        error: the exception, if it failed: logits that are not finite, an exception of one of its rules or of a pass
            that it shared. An interrupt is none: the ``finish_reason`` is "interrupted".
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
        turn: step in which it read its prompt last; before, the one in which it came, less ``NEW``.
        passed_over: number of steps for which it has waited for the target.
    """

    id: int
    request: Request
    run: RequestRun
    reader: TokenReader | None
    began: float
    turn: int
    passed_over: int = 0

    @property
    def asks(self) -> type[PassInput] | str | None:
        """The kind of its next input; of a prompt, the model that reads it."""
        given = self.run.input
        return given.model if isinstance(given, PromptRow) else None if given is None else type(given)

    @property
    def awaits(self) -> Future[Any] | None:
        """What the input waits for: an answer of the grammar; None: nothing."""
        given = self.run.input
        if isinstance(given, AskGrammar):
            return given.found
        adjust = given.adjust if isinstance(given, DraftRow | TreeRow | TargetRow) else None
        return adjust and adjust.masks


class Scheduler:
    """The rows of both models and the requests that are decoded in them. Not thread-safe.

    Args:
        runtime: models, heads and caches of the pair.
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
        events: events that ``step`` has not returned yet. max_len: as given.
        arrived: whether a request is about to be put; asked between passes, whose step it may end: 0: none is, 2: one
            of an owner without others.
    """

    def __init__(
        self,
        runtime: PairRuntime,
        rows: int,
        max_len: int,
        policy: Policy,
        memory_bytes: int | None = None,
        needs_target: bool = True,
        needs_draft: bool = True,
        streams: bool = True,
        spare: int = 0,
    ) -> None:
        self._runtime, self._policy, self.max_len, self._rows = runtime, policy, max_len, rows
        at_least("rows", rows, 1)
        if memory_bytes is not None:
            at_least("memory_bytes", memory_bytes, 0)
        if not isinstance(policy, Policy):
            raise UserError(f"policy={policy!r} is not a policy: give sprinter.Policy(...), or leave it out")
        loaded = [runtime.models.target] * needs_target + [runtime.models.draft] * needs_draft
        models = [one.model for one in loaded if one is not None]
        for model in models:
            kind, reason = runner_kind(model)
            if rows > 1 and kind == "crop":
                name = type(model).__name__
                raise RowsError(f"{name} decodes one row at a time ({reason}): use rows=1")
        runtime.check_memory(max_len, rows, needs_target, needs_draft, memory_bytes, spare)
        self._models = runtime.take(max_len, rows, needs_target, needs_draft, spare)
        self._waiting: dict[int, Request] = {}
        self._live: dict[int, _Live] = {}
        self.events: list[Event] = []
        self._ended: dict[int, Event] = {}  # that `results` has not returned yet
        self._next_id = self._steps = 0
        self._streams, self._closed, self._spare = streams, False, spare
        self.arrived: Callable[[], int] = lambda: 0
        self._cut_short = self._alone = 0  # what has ended the step before; steps of new requests alone
        self._preferred, self._new = set[int](), set[int]()
        self._trackers: dict[Any, Tracker] = {}
        self._wanted = False  # whether somebody waits for the last request
        self._awaited = inf  # tokens of a row's text, in the mean, if so, and none waits for a row
        target, draft = runtime.models.target, runtime.models.draft
        self._pads = pads_rows(target.model), draft is not None and pads_rows(draft.model)
        self._order = list(range(rows))  # rows in the order in which they were last freed

    @property
    def unfinished(self) -> int:
        """Number of requests that are queued or active."""
        return len(self._waiting.keys() | self._live.keys())

    @property
    def held(self) -> float:
        """Share of the rows' slots that hold tokens of texts, 0 to 1; may be asked in any thread."""
        texts = [one.request for one in tuple(self._live.values())]
        return sum(len(one.sequence) for one in texts) / (self._rows * self.max_len)

    @property
    def _free(self) -> list[int]:
        taken = {one.run.row for one in self._live.values()}
        return [number for number in range(self._rows) if number not in taken]

    def put(self, request: Request) -> int:
        """Put a request in the queue; returns its number.

        Raises:
            UserError: the request is longer than a row, or the engine is closed.
        """
        if self._closed:
            raise UserError("the engine is closed: make another")
        self.check(request)
        request.share(self._trackers, lambda: len(self._live), lambda: self._awaited)
        id, self._next_id = self._next_id, self._next_id + 1
        self._waiting[id] = request
        return id

    def check(self, request: Request) -> None:
        """Refuse a request that does not fit a row.

        Raises:
            UserError: it is longer than a row, or its tree is.
        """
        if request.spare > self._spare:
            raise UserError(
                f"method {request.method.name} drafts a tree with {request.spare} tokens beside the text, and a row of "
                f"the engine has room for {self._spare}: give a smaller gamma or tree, or fewer drafts"
            )
        if request.length > self.max_len:
            raise ContextLengthError(
                f"prompt and new tokens are {request.length} tokens, and a row of the engine holds {self.max_len}: "
                f"give max_len={request.length} or more, or a smaller max_new_tokens"
            )

    def step(self) -> list[Event]:
        """Advance all requests by a step, with at most one forward pass of each kind.

        An error in one request ends only that request, an error of a pass (out of memory) those that share it; their
        events hold the error. An interrupt is raised here and ends the requests whose pass it breaks off: their events
        follow in the next step.

        Returns:
            An event for each request that has new tokens or has ended.
        """
        self.advance()
        events, self.events = self.events, []
        return events

    def advance(self) -> None:
        """``step`` that leaves its events in ``events``: admit queued requests to free rows, run one forward pass of
        each kind that is due."""
        began = time.perf_counter()
        self._steps += 1
        try:
            self._admit()
            last = self._wanted and not self._waiting and self._live.values()
            self._awaited = fmean(one.request.new for one in last) if last else inf
            self._run_passes(self._due())
        finally:
            now = time.perf_counter()
            for one in self._live.values():
                one.request.record.stats.wall_s += now - max(one.began, began)
        for one in list(self._live.values()):
            if one.run.over or one.reader is not None:
                self._note(one)

    def _due(self) -> Collection[_Live]:
        """The requests of a step: all, or those alone that have no text yet and whose owners have no other request, so
        that a first token waits for no pass of many rows. Between two steps of all there are at most two of the latter,
        of different requests."""
        every = self._live.values()
        if all(one.request.record.tokens for one in every):
            self._new, self._preferred, self._alone = set(), set(), 0
            return every
        owned = Counter(one.request.owner for one in every)
        self._new = {
            one.id for one in every if owned[one.request.owner] == 1 and not one.request.record.tokens
        }
        new = [one for one in every if one.id in self._new - self._preferred]
        alone = self._policy.first and 0 < len(new) < len(every) and self._alone < 2
        self._alone = self._alone + 1 if alone else 0
        self._preferred = {one.id for one in new} if self._alone else set()
        return new if self._alone else every

    def _run_passes(self, due: Collection[_Live]) -> None:
        """Run one pass of each kind that requests ask for; if a request arrives, not all, but not twice in a row unless
        only the second one is of an owner without others."""
        asking, before = self._asking(due), self._cut_short
        self._cut_short = before if self._alone else 0  # a step of new requests alone is not the whole one
        # The target reads last, as most methods ask it after a draft: a short text begins in its first step.
        # A grammar is asked what must follow, then what it keeps of a proposal.
        judged = list[_Live]()  # in the target's pass behind drafts
        for kind in (None, AskGrammar, AskGrammar, "draft", DraftRow, TreeRow, "target"):
            if kind in asking:
                group = self._reading(asking[kind]) if isinstance(kind, str) else self._ready(asking[kind])
                if kind is DraftRow:
                    judged = self._chained(group, asking.get(TargetRow, ()))
                    group = [*group, *(one for one in judged if one not in group)]
                self._do(group)
                asking = self._asking(due)  # their next inputs
                if asking and not self._alone and (arrived := self.arrived()) > before:
                    self._cut_short = arrived
                    for one in asking.get(TargetRow, []):
                        one.passed_over += 1
                    return
        # Plain rounds of those that the target has read for go on in the next step, with the drafts of others.
        waiting = [one for one in asking.get(TargetRow, []) if one not in judged or not _plain_tokens(one)]
        longest = max((one.passed_over for one in waiting), default=0)
        # A row that reads its prompt does not come to the target for many steps: nobody waits for it.
        under_way = sum(
            len(group) for kind, group in asking.items() if kind not in ("target", "draft", AskGrammar)
        )
        silent = any(not one.request.record.tokens for one in waiting)
        # Requests that need the target since this step take part.
        if waiting and self._policy.calls(len(waiting), under_way, longest, silent):
            self._do(called := self._fitting(self._ready(waiting)))
            waiting = [one for one in waiting if one not in called]
        for one in waiting:
            one.passed_over += 1

    def _ready(self, group: list[_Live]) -> list[_Live]:
        """Those of a group that wait for no grammar. A short wait is shared, but not by a request that arrives or
        is new (see ``_due``); a longer one is of its own row alone. Masks of a row alone, or of a batch, are found
        while the model reads."""
        many = self._policy.first and len(self._live) > 1
        if not many and not isinstance(group[0].run.input, AskGrammar):
            return group
        found = [one.awaits for one in group]
        began = time.perf_counter()
        while not self.arrived():
            awaited = zip(group, found, strict=True)
            left = {one.id: answer for one, answer in awaited if answer and not answer.done()}
            if not left or time.perf_counter() - began > (_POLL if self._new - left.keys() else _PATIENCE):
                break
            wait(left.values(), _POLL)
        return [one for one, answer in zip(group, found, strict=True) if answer is None or answer.done()]

    def _fitting(self, waiting: list[_Live]) -> list[_Live]:
        """Those that read together as many tokens as a pass of the target may."""
        left = self._policy.target_tokens
        if left is None:
            return waiting
        chosen = list[_Live]()
        for one in sorted(waiting, key=lambda one: -one.passed_over):
            given = one.run.input
            assert isinstance(given, TargetRow)
            if (size := len(given.feed.tokens)) <= left or not chosen:
                chosen.append(one)
                left -= size
        return sorted(chosen, key=lambda one: one.run.row)

    def results(self, what: str) -> dict[int, Generation]:
        """Step until no request is left; see ``Engine.finish``. ``what``: name of a request in error messages."""
        self._wanted = True
        try:
            while self.unfinished or self.events:
                self.advance()
                self._ended |= {event.id: event for event in self.events if event.generation is not None}
                self.events.clear()
        finally:
            self._wanted = False
        last, self._ended = dict(sorted(self._ended.items())), {}
        results = {id: event.generation for id, event in last.items() if event.generation is not None}
        errors = {id: event.error for id, event in last.items() if event.error is not None}
        if not errors:
            return results
        done = {id: result for id, result in results.items() if id not in errors}
        failed = {id: results[id] for id in errors}
        raise BatchError(what, errors, done, failed) from next(iter(errors.values()))

    def cancel(self, id: int) -> Generation:
        """Cancel a request, queued or active; its rows are freed at once.

        Returns:
            The result so far, with ``finish_reason`` "cancelled".

        Raises:
            UserError: there is no such request, or it has ended.
        """
        request = self._waiting.pop(id, None)
        if id in self._live:
            request = self._live[id].request
            self._leave(self._live[id])
        if request is None:
            raise UserError(f"request {id} is not under way: it is finished, cancelled or was never added")
        return request.generation()

    def close(self) -> None:
        """Cancel all requests and release the caches."""
        if self._closed:
            return
        self._closed = True
        self._live.clear()
        self._waiting.clear()
        self._runtime.give_back(self._models)

    def _admit(self) -> None:
        """Admit requests in the order of the queue, as long as rows are free."""
        while self._waiting and (free := self._free):
            id, request = next(iter(self._waiting.items()))
            row = self._best(free, request)
            for rows in self._models.models:
                rows.owners[row] = request.salt
            run = request.begin(self._models, row, self._policy.prompt_piece)
            reader = TokenReader(request) if self._streams else None
            self._live[id] = _Live(id, request, run, reader, time.perf_counter(), self._steps - NEW)
            del self._waiting[id]

    def _best(self, free: Sequence[int], request: Request) -> int:
        """The row whose earlier text this one continues; else the one that has been free longest."""
        oldest_first = [row for row in self._order if row in free]
        models = self._models.models
        return models[0].best_row(oldest_first, request.prefix, request.salt) if models else oldest_first[0]

    def _asking(self, due: Collection[_Live]) -> dict[type[PassInput] | str | None, list[_Live]]:
        """Requests by the kind of input that they ask for, in the order of their rows; None: they have not begun."""
        asking: dict[type[PassInput] | str | None, list[_Live]] = {}
        for one in sorted(due, key=lambda one: one.run.row):
            if not one.run.over:
                asking.setdefault(one.asks, []).append(one)
        return asking

    def _reading(self, group: Sequence[_Live]) -> Sequence[_Live]:
        """Those of a group that reads prompts whose turn it is."""
        most = self._policy.prompt_tokens
        if most is None:
            return group
        turns: dict[str, int] = {}
        for one in self._live.values():
            turns[one.request.owner] = max(one.turn, turns.get(one.request.owner, one.turn))
        chosen = choose_prompts([self._chunk(one) for one in group], turns, most)
        for one in chosen:
            one.turn = self._steps
        return sorted(chosen, key=lambda one: one.run.row)

    def _chunk(self, one: _Live) -> ChunkTurn[_Live]:
        """The chunk of a prompt that a row reads next."""
        given, request = one.run.input, one.request
        assert isinstance(given, PromptRow)
        feed, rows = given.feed, self._models.target if given.model == "target" else self._models.draft
        shared = rows is not None and rows.held.on and not given.layers  # read once, and copied
        text = tuple(request.sequence.tokens[: feed.start + len(feed.tokens)])
        chunk = (request.salt, feed.start, text) if shared else one.id
        return ChunkTurn(one, request.owner, one.turn, len(feed.tokens), chunk)

    def _chained(self, group: Sequence[_Live], waiting: Sequence[_Live]) -> list[_Live]:
        """Those of a group that drafts behind whose drafts a pass of the target follows, and of those that wait for the
        target the ones that take part in it: they draft nothing."""
        most, read = self._policy.draft_steps, self._policy.target_tokens
        sizes = list[int]()
        for one in group:
            given = one.run.input
            if isinstance(given, DraftRow) and most is not None and given.count > most:
                one.run.input = replace(given, count=most, chain=None)
            elif isinstance(given, DraftRow) and given.chain is not None:
                sizes.append(len(given.chain.feed.tokens) + given.count)
        left = inf if read is None else read - sum(sizes)
        chained = [one for one in group if isinstance(given := one.run.input, DraftRow) and given.chain]
        if left < 0:  # the target reads these rows in turns
            for one in chained:
                assert isinstance(one.run.input, DraftRow)
                one.run.input = replace(one.run.input, chain=None)
            return []
        for one in waiting if chained else ():
            size = _plain_tokens(one)
            if 0 < size <= min(left, max(sizes)):  # no row is padded for one beside it
                chained.append(one)
                left -= size
        return chained

    def _do(self, group: Sequence[_Live]) -> None:
        """Run one forward pass for a group, if there is anybody in it."""
        for one in group:
            one.passed_over = 0
        if group:
            advance(self._models, [one.run for one in group], self._pads)

    def _leave(self, one: _Live) -> None:
        """Free the rows of a request."""
        row = one.run.row
        one.request.leave(self._models)
        self._order = [*(other for other in self._order if other != row), row]
        del self._live[one.id]

    def _note(self, one: _Live) -> None:
        """Append the event of a request that has new tokens, or that has ended, whose rows are freed."""
        over, reader = one.run.over, one.reader
        tokens = reader.read() if reader else []
        generation = None
        if over:
            # its reader has rendered the whole text with its last tokens, if there were any left
            generation = one.request.generation(
                rendered=bool(tokens) and one.request.record.finish is not None
            )
            self._leave(one)
        if tokens or over:
            error = one.run.error
            self.events.append(
                Event(one.id, tokens, generation, error if isinstance(error, Exception) else None)
            )


def _plain_tokens(one: _Live) -> int:
    """Number of tokens that the target reads for a request that drafts nothing; 0: it drafts."""
    given = one.run.input
    return len(given.feed.tokens) if isinstance(given, TargetRow) and draws_alone(given) else 0
