"""Streaming: one text, token by token."""

from __future__ import annotations

import time
import weakref

from sprinter.decode.draft import Token
from sprinter.engine.ending import TextWriter
from sprinter.engine.generation import Generation
from sprinter.engine.jobs import Models
from sprinter.engine.task import Task, render
from sprinter.engine.work import Work

__all__ = ["Stream", "TokenReader"]


class TokenReader:
    """Returns each token of a request once, with its text.

    Attributes:
        place: the position in the text. After an interrupt, a caller resets it to read the same tokens again.
    """

    def __init__(self, run: Task) -> None:
        self._run = run
        self.place: tuple[int, TextWriter | None] = (0, run.writer())

    @property
    def left(self) -> int:
        """Number of tokens that were not returned yet."""
        return max(0, len(self._run.record.tokens) - self.place[0])  # fewer if the request started over

    def read(self, at_most: int | None = None) -> list[Token]:
        """Return the next tokens. The last token of a finished text also has the rest of the text."""
        record, (given, writer) = self._run.record, self.place
        tokens = record.tokens[given : None if at_most is None else given + at_most]
        given += len(tokens)
        if tokens and writer is not None:
            writer = writer.copy()
            render(tokens, writer, last=record.finish is not None and given == len(record.tokens))
        self.place = given, writer
        return tokens


class Stream:
    """Iterator over tokens as they become final. Closing it early is safe; ``generation`` is the result so far.

    The ``text`` of a token is the text that it completes: "" inside a character, and while a stop string may have
    begun. The texts of a whole stream join to ``generation.text``; those of a stream that was closed early, to a prefix
    of it.

    A trusted token is returned at once, and its ``drift`` is filled in when the target has scored it; under ``budget``
    and ``tail_ratio`` it is returned then.

    After an interrupt (Ctrl-C, out of memory), iterate again: the text is the same. Logits that are not finite, and an
    exception of a rule, end the text: the error is raised once, and ``finish_reason`` is "error". (Decoding may start
    over after an interrupt: if it then fails or is closed early, ``generation`` may be shorter than before.)
    """

    def __init__(self, run: Task) -> None:
        self._run, self._reader = run, TokenReader(run)
        self._models: Models | None = None
        self._work: Work | None = None
        self._closed = False

    def __repr__(self) -> str:
        record = self._run.record
        return (
            f"Stream({self._run.method.name}, {len(record.tokens)} tokens, {record.finish or 'unfinished'})"
        )

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        while not self._reader.left:
            if not self._step():
                raise StopIteration
        if self._run.record.finish is not None and self._reader.left == 1:
            self.finish()  # may run a closing forward pass; after an interrupt of it the token is returned again
        place = self._reader.place
        try:
            (token,) = self._reader.read(1)
            return token
        except BaseException:
            self._reader.place = place
            raise

    def finish(self) -> Generation:
        """Decode to the end, and return the whole result."""
        while self._step():
            pass
        return self.generation

    def close(self) -> None:
        """Stop decoding and release the caches."""
        self._closed = True
        if self._models is not None:
            self._give_back()

    def _step(self) -> bool:
        """Run one job; False if there is none left. ``wall_s`` excludes the time between calls."""
        if self._closed:
            return False
        began = time.perf_counter()
        try:
            models, work = self._begin()
            if work.begun and work.job is not None:
                (done,) = models.run([work.job])
                work.go_on(done)
            else:
                work.go_on()
        finally:
            self._run.record.stats.wall_s += time.perf_counter() - began
        if work.over:
            self.close()
        if work.error is not None:
            raise work.error
        return True

    def _begin(self) -> tuple[Models, Work]:
        """Borrow caches and start work in them; they are released when the stream is closed or garbage-collected."""
        if self._models is None or self._work is None:
            run = self._run
            models = run.take()
            self._give_back = weakref.finalize(self, run.give_back, models)
            self._give_back.atexit = False
            self._models, self._work = models, Work(run, models, 0)
        return self._models, self._work

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The result so far; ``finish_reason`` is "cancelled" if the text is unfinished."""
        return self._run.generation()
