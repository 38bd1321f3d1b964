"""A text token by token."""

from __future__ import annotations

import time
import weakref

from sprinter.decode.draft import Token
from sprinter.engine.driver import Models
from sprinter.engine.ending import TextWriter
from sprinter.engine.generation import Generation
from sprinter.engine.task import Task, render
from sprinter.engine.work import Work

__all__ = ["Stream", "TokenReader"]


class TokenReader:
    """Gives out the tokens of a request once each, with their text.

    Attributes:
        place: how far it is. Whoever took tokens and was broken off sets it back, and reads them again.
    """

    def __init__(self, run: Task) -> None:
        self._run = run
        self.place: tuple[int, TextWriter | None] = (0, run.writer())

    @property
    def left(self) -> int:
        """Tokens that were not given out yet."""
        return max(0, len(self._run.record.tokens) - self.place[0])  # fewer where a request began anew

    def read(self, at_most: int | None = None) -> list[Token]:
        """The next tokens. The last one of a finished text carries what is left of the text."""
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

    The ``text`` of a token is what became certain with it: "" inside a character and where a stop string may have
    begun. The pieces of a whole stream join to ``generation.text``; of one that was closed early, to a beginning of it.

    A trusted token comes out at once; its ``drift`` is filled in when the target has scored it.

    An interrupt (Ctrl-C, no memory for a pass) harms nothing: go on, and the text is the same. Logits that are not
    finite, and whatever a rule raises, end the text: they are raised once, ``finish_reason`` is then "error". (After an
    interrupt a text is made anew: if it then fails or is closed early, ``generation`` may be the shorter one.)
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
            self.finish()  # a closing pass may be left; whatever interrupts it, the token is still to come
        place = self._reader.place
        try:
            (token,) = self._reader.read(1)
            return token
        except BaseException:
            self._reader.place = place
            raise

    def finish(self) -> Generation:
        """Work to the end; the whole result."""
        while self._step():
            pass
        return self.generation

    def close(self) -> None:
        """Stop; the caches are given back."""
        self._closed = True
        if self._models is not None:
            self._give_back()

    def _step(self) -> bool:
        """One job further; False if nothing is left to do. The clock stands still while the caller has the turn."""
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
        """Caches on loan until the stream is closed or nobody has it any more, and what is done in them."""
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
        """What was generated so far, ``finish_reason`` "cancelled" if the text has no end yet."""
        return self._run.generation()
