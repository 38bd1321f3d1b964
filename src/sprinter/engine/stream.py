"""Streaming: one text, token by token."""

from __future__ import annotations

import time
import weakref

from sprinter.decode.draft import Token
from sprinter.engine.executor import Executor
from sprinter.engine.generation import Generation
from sprinter.engine.request import Request, advance, render

__all__ = ["Stream", "TokenReader"]


class TokenReader:
    """Returns each token of a request once, with its text."""

    def __init__(self, task: Request) -> None:
        self._task, self._given, self._writer = task, 0, task.writer()

    @property
    def left(self) -> int:
        """Number of tokens that were not returned yet."""
        return len(self._task.record.tokens) - self._given

    def read(self, at_most: int | None = None) -> list[Token]:
        """Return the next tokens. The last token of a finished text also has the rest of the text."""
        record, given, writer = self._task.record, self._given, self._writer
        tokens = record.tokens[given : None if at_most is None else given + at_most]
        given += len(tokens)
        if tokens and writer is not None:
            writer = writer.copy()
            render(tokens, writer, last=record.finish is not None and given == len(record.tokens))
        self._given, self._writer = given, writer
        return tokens


class Stream:
    """Iterator over tokens as they become final. Closing it early is safe; ``generation`` is the result so far.

    The ``text`` of a token is the text that it completes: "" inside a character, and while a stop string may have
    begun. The texts of a whole stream join to ``generation.text``; those of a stream that was closed early, to a prefix
    of it.

    A trusted token is returned at once, and its ``drift`` is filled in when the target has scored it; under ``budget``
    and ``tail_ratio`` it is returned then.

    What fails ends the text: logits that are not finite, an exception of a rule or a pass (``finish_reason`` "error"),
    an interrupt in a step (Ctrl-C, "interrupted"). It is raised once, and the final tokens stay in ``generation``.
    """

    def __init__(self, task: Request) -> None:
        self._task, self._reader = task, TokenReader(task)
        self._models: Executor | None = None
        self._closed = False

    def __repr__(self) -> str:
        record = self._task.record
        return (
            f"Stream({self._task.method.name}, {len(record.tokens)} tokens, {record.finish or 'unfinished'})"
        )

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        while not self._reader.left:
            if not self._step():
                raise StopIteration
        if self._task.record.finish is not None and self._reader.left == 1:
            self.finish()  # may run a closing forward pass
        (token,) = self._reader.read(1)
        return token

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
        """Run one pass; False if there is none left. ``wall_s`` excludes the time between calls."""
        if self._closed:
            return False
        task, began = self._task, time.perf_counter()
        try:
            if self._models is None:
                models = task.take()
                # when the stream is closed or garbage-collected
                self._give_back = weakref.finalize(self, task.give_back, models)
                self._give_back.atexit = False
                self._models = models
                task.begin(models, 0)
            advance(self._models, [task])
        finally:
            task.record.stats.wall_s += time.perf_counter() - began
            if task.over:  # after an interrupt too
                self.close()
        if task.run.error is not None:
            raise task.run.error
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The result so far; ``finish_reason`` is "cancelled" if the text is unfinished."""
        return self._task.generation()
