"""The public engine: many requests at once, each with its own settings."""

from __future__ import annotations

from typing import Self, Unpack

from sprinter.decode.checks import at_least
from sprinter.engine.generation import Generation
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.engine.pair import Pair
from sprinter.engine.policy import Policy
from sprinter.engine.prompt import PromptInput
from sprinter.engine.request import Request
from sprinter.engine.scheduler import Scheduler
from sprinter.errors import UserError
from sprinter.models.choose import reads_trees, tree_leaves

__all__ = ["Engine"]

_LONGEST = 2048
"""Default length of a row, where the context is not shorter."""
_SPARE = 64
"""Slots of a row for a tree, beside its text; none where a runner reads chains alone."""


class Engine(Scheduler):
    """Serves many requests at once; a finished one's rows are taken by the next in the queue (continuous batching).

    A text does not depend on the other requests, but with ``never_slower`` (which ``auto`` has), where rows decide
    together whether to draft, and begin with what those before them have learned if drafts change no text. ``auto``
    weighs costs for as many rows as have requests when it is added. Else the same seed gives the text of
    ``Pair.generate``. (Floating-point sums are taken in a different order, so texts may differ in float32 and bfloat16
    where two tokens are nearly tied.)

    Times in a request's stats: the time of a forward pass is divided equally among its rows. ``wall_s`` counts the
    engine's steps from when the request gets its rows to its end, so that ``other_s`` includes the time in which other
    requests were served. Not thread-safe.

    Args:
        pair: what to generate with.
        rows: number of rows in the caches, which are allocated once; the maximum number of concurrent requests.
        policy: when the target's forward pass is run.
        max_len: length of a row in tokens, prompt included; None: the larger context of the two models, at most 2,048.
        memory_bytes: maximum size of the caches; None: 90 % of the free memory.

    Raises:
        UserError: the rows do not fit into memory (the message names the largest number that does), or a model decodes
            one row at a time.
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
        at_least("rows", rows, 1)
        if longest > most:
            raise UserError(f"max_len={max_len!r} is out of range: give 1 to {most} tokens")
        loaded = [model for model in (pair.models.target, pair.models.draft) if model is not None]
        spare = _SPARE if all(reads_trees(one.model) for one in loaded) else 0
        leaves = [many for one in loaded if (many := tree_leaves(one.model, rows)) is not None]
        spare = min([spare, *(many - 1 for many in leaves)])
        super().__init__(pair._runtime, rows, longest, policy, memory_bytes, spare=spare)

    def __repr__(self) -> str:
        return f"Engine({self._rows} rows of {self.max_len} tokens, {self.unfinished} requests unfinished)"

    def add(
        self,
        prompt: PromptInput,
        options: GenerationOptions | None = None,
        **keywords: Unpack[GenerationKeywords],
    ) -> int:
        """Put a request in the queue.

        Args:
            prompt: text, token ids, or chat messages, as in ``Pair.generate``.
            options, keywords: as in ``Pair.generate``; ``max_new_tokens=None``: up to the end of the row.

        Returns:
            The number of the request.

        Raises:
            UserError: what is wrong with the request and how to fix it.
        """
        return self.put(self._task(prompt, GenerationOptions.of(options, keywords), self.unfinished))

    def _task(
        self,
        prompt: PromptInput,
        options: GenerationOptions,
        others: int,
        owner: str = "",
        salt: str | None = None,
    ) -> Request:
        """A request that fits a row, beside so many others; may be called in any thread."""
        sharing = min(self._rows, others + 1)
        task = Request(self._runtime, prompt, options, self.max_len, sharing, self._rows, owner, salt)
        self.check(task)
        return task

    def finish(self) -> dict[int, Generation]:
        """Step until no request is left; returns the results of the requests that end from now on, by number.

        After an interrupt, call it again: no result is lost, and the requests that it has ended are "interrupted".

        Raises:
            BatchError: some requests failed; it holds all results.
        """
        return self.results("request")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
