"""The texts of a request: their streams, and the scored prompts that go before them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any, TypeVar

from starlette.types import Receive

from sprinter.decode.draft import Token
from sprinter.engine.async_engine import EngineStream
from sprinter.engine.generation import Generation
from sprinter.engine.grammar import is_confined
from sprinter.engine.prompt import EncodedPrompt
from sprinter.engine.scoring import ScoredToken
from sprinter.serve.api_errors import Refusal
from sprinter.serve.message_parsing import TextParts
from sprinter.serve.request_parsing import TextRequest
from sprinter.serve.service import Service

__all__ = [
    "AnswerChoice",
    "ClientLeft",
    "Unscored",
    "finish_texts",
    "in_time",
    "open_choices",
    "score_prompts",
    "wait_for_rows",
    "while_connected",
]

Awaited = TypeVar("Awaited")


class ClientLeft(Exception):
    """The client has closed the connection."""


@dataclass(eq=False)
class AnswerChoice:
    """One text of a request.

    Attributes:
        index: number of the text in the answer. owner: whose it is.
        prompt: its prompt. scored: the prompt's log-probabilities, if they were asked for.
        stream: the text; None if nothing is generated.
        parts: what reads it as it is answered.
    """

    index: int
    owner: str
    prompt: EncodedPrompt
    stream: EngineStream | None
    scored: list[ScoredToken] | None = None
    parts: TextParts = field(default_factory=TextParts)

    @property
    def out(self) -> Generation | None:
        """The text, once it has ended."""
        return None if self.stream is None else self.stream.generation


@dataclass(eq=False)
class Unscored:
    """The tokens of a text that were sent before the target had scored them."""

    left: list[tuple[int, Token]] = field(default_factory=list)
    sent: int = 0

    def add(self, tokens: Sequence[Token]) -> list[tuple[int, Token]]:
        """Note tokens that are sent now; returns them with their indices."""
        numbered = list(enumerate(tokens, self.sent))
        self.sent += len(tokens)
        self.left += [one for one in numbered if not _is_scored(one[1])]
        return numbered

    def settled(self) -> list[tuple[int, Token]]:
        """Tokens that were sent earlier and have been scored since."""
        found = [one for one in self.left if _is_scored(one[1])]
        if found:
            self.left = [one for one in self.left if not _is_scored(one[1])]
        return found


def _is_scored(token: Token) -> bool:
    return token.drift is not None or token.logprob is not None


@asynccontextmanager
async def open_choices(service: Service, asked: TextRequest, owner: str) -> AsyncIterator[list[AnswerChoice]]:
    """Submit the texts of a request; they are cancelled if the block is left before their end.

    Raises:
        UserError, EngineError, Refusal: why they are not taken.
    """
    gone, slow = Event(), is_confined(asked.options)  # a grammar may be compiled for seconds
    try:
        work = service.turns.run(owner, lambda: service.submit(asked, owner, gone), slow=slow)
        prompts, streams, parts = await work
    except asyncio.CancelledError:
        gone.set()
        raise
    n = asked.n
    choices = [
        AnswerChoice(i, owner, prompts[i // n], streams[i] if streams else None, parts=parts[i])
        for i in range(len(prompts) * n)
    ]
    try:
        yield choices
    finally:
        for stream in streams:
            stream.cancel()
        left = service.new_tokens(asked, prompts)
        for stream in streams:
            await stream.aclose()
            if stream.generation is not None:
                left -= len(stream.generation.tokens)
                service.metrics.ended(service.model, stream, stream.generation)
        service.owners.give_back_tokens(owner, left)


async def score_prompts(service: Service, asked: TextRequest, choices: Sequence[AnswerChoice]) -> None:
    """Fill in the log-probabilities of the prompts, if the answer shows them."""
    if not asked.echo or asked.logprobs is None:
        return
    for choice in choices:
        first = choices[choice.index - choice.index % asked.n]
        if first.scored is None:
            first.scored = await service.engine.score(first.prompt.ids, asked.logprobs, owner=choice.owner)
        choice.scored = first.scored


async def finish_texts(service: Service, asked: TextRequest, choices: Sequence[AnswerChoice]) -> None:
    """Wait until all texts of a request have ended.

    Raises:
        ExceptionGroup: of the errors of texts.
    """
    await score_prompts(service, asked, choices)
    async with asyncio.TaskGroup() as texts:
        for choice in choices:
            if choice.stream is not None:
                texts.create_task(choice.stream.finish())


async def wait_for_rows(service: Service, choices: Sequence[AnswerChoice]) -> None:
    """Wait until the first text of a request has rows.

    Raises:
        Refusal: it waits too long.
    """
    streams = [choice.stream for choice in choices if choice.stream is not None]
    if not streams:
        return
    try:
        async with asyncio.timeout(service.settings.queue_timeout_s):
            await streams[0].started()
    except TimeoutError:
        wait_s = service.retry_after_s()
        raise Refusal(
            503, "all rows are taken: try again later", "queue_timeout", retry_after_s=wait_s
        ) from None


async def in_time(service: Service, work: Awaitable[Awaited], deadline: float) -> Awaited:
    """Wait for the work of a request, at most until its deadline.

    Raises:
        Refusal: it takes longer.
    """
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError:
        most = service.settings.request_timeout_s
        raise Refusal(504, f"the request took longer than {most:g} s: ask for less", "timeout") from None


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Awaited]) -> Awaited:
    """Wait for work, which is cancelled as soon as the client leaves.

    Raises:
        ClientLeft: it has left.
    """

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientLeft
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)
