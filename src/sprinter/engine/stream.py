"""A text token by token."""

from __future__ import annotations

from sprinter.decode.draft import Token
from sprinter.engine.generation import Generation
from sprinter.engine.run import Run, render

__all__ = ["Reader", "Stream"]


class Reader:
    """Gives out the tokens of a request once each, with their text."""

    def __init__(self, run: Run) -> None:
        self._run, self._given = run, 0
        self._writer = run.writer()

    @property
    def left(self) -> int:
        """Tokens that were not given out yet."""
        return len(self._run.record.tokens) - self._given

    def read(self, at_most: int | None = None) -> list[Token]:
        """The next tokens. The last one of a finished text carries what is left of the text."""
        record = self._run.record
        end = len(record.tokens) if at_most is None else self._given + at_most
        tokens = record.tokens[self._given : end]
        self._given += len(tokens)
        if tokens and self._writer is not None:
            render(tokens, self._writer, last=record.finish is not None and not self.left)
        return tokens


class Stream:
    """Iterator over tokens as they become final. Closing it early is safe; ``generation`` is the result so far.

    The ``text`` of a token is what became certain with it: "" inside a character and where a stop string may have
    begun. The pieces of a whole stream join to ``generation.text``; of one that was closed early, to a beginning of it.

    A trusted token comes out at once; its ``drift`` is filled in when the target has scored it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = run.steps()
        self._reader = Reader(run)

    def __repr__(self) -> str:
        record = self._run.record
        return f"Stream({self._run.request.method.name}, {len(record.tokens)} tokens, {record.finish or 'unfinished'})"

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Token:
        while not self._reader.left:
            next(self._steps)
        (token,) = self._reader.read(1)
        if self._run.record.finish is not None and not self._reader.left:
            for _ in self._steps:  # a closing pass may be left
                pass
        return token

    def finish(self) -> Generation:
        """Work to the end; the whole result."""
        for _ in self._steps:
            pass
        return self.generation

    def close(self) -> None:
        """Stop; the caches are given back."""
        self._steps.close()  # type: ignore[attr-defined]

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def generation(self) -> Generation:
        """What was generated so far, ``finish_reason`` "cancelled" if the text has no end yet."""
        return self._run.generation()
