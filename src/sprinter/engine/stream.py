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

    def __init__(self, request: Request) -> None:
        self._request, self._given, self._writer = request, 0, request.writer()

    @property
    def left(self) -> int:
        """Number of tokens that were not returned yet."""
        return len(self._request.record.tokens) - self._given

    def read(self, at_most: int | None = None) -> list[Token]:
        """Return the next tokens. The last token of a finished text also has the rest of the text."""
        record, given, writer = self._request.record, self._given, self._writer
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

    def __init__(self, request: Request) -> None:
        self._request, self._reader = request, TokenReader(request)
        self._models: Executor | None = None
        self._closed = False

    def __repr__(self) -> str:
        record = self._request.record
        return f"Stream({self._request.method.name}, {len(record.tokens)} tokens, {record.finish or 'unfinished'})"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        while not self._reader.left:
            if not self._step():
                raise StopIteration
        if self._request.record.finish is not None and self._reader.left == 1:
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
        request, began = self._request, time.perf_counter()
        try:
            if self._models is None:
                models = request.take()
                # when the stream is closed or garbage-collected
                self._give_back = weakref.finalize(self, request.give_back, models)
                self._give_back.atexit = False
                self._models = models
                request.begin(models, 0)
            advance(self._models, [request])
        finally:
            request.record.stats.wall_s += time.perf_counter() - began
            if request.over:  # after an interrupt too
                self.close()
        if request.run.error is not None:
            raise request.run.error
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """The result so far; ``finish_reason`` is "cancelled" if the text is unfinished."""
        return self._request.generation()
