"""An answer as server-sent events, written while its texts are generated."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sprinter.decode.draft import Token
from sprinter.serve.api_errors import of_error
from sprinter.serve.completion_streams import (
    AnswerChoice,
    ClientLeft,
    Unscored,
    in_time,
    score_prompts,
    while_connected,
)
from sprinter.serve.guard import note_of
from sprinter.serve.logprobs import of_tokens
from sprinter.serve.responses import (
    ServerAnswer,
    finish_of,
    json_parts,
    running_usage,
    send_parts,
    speculation_of,
    to_json,
    usage_of,
)
from sprinter.serve.service import Service
from sprinter.serve.speculation import sprinter_report, token_report

__all__ = ["Events"]


class Events(Response):
    """The response that writes the events of one answer, to one client.

    Args:
        service: what serves the request. answer: the frame of all events. choices: the texts.
        leave: the context that cancels them, closed at the end or as soon as the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(
        self, service: Service, answer: ServerAnswer, choices: Sequence[AnswerChoice], leave: AsyncExitStack
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._service, self._answer, self._choices, self._leave = service, answer, choices, leave
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send, self._note = send, note_of(scope)
        async with self._leave:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(ClientLeft):
                await while_connected(receive, self._write_all(self._note.deadline))
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write_all(self, deadline: float) -> None:
        """Write all events; an error becomes the last one."""
        try:
            await in_time(self._service, self._write(), deadline)
        except Exception as error:
            await self._data(of_error(error).body())
        await self._body(b"data: [DONE]\n\n")

    async def _write(self) -> None:
        asked, choices = self._answer.asked, self._choices
        await score_prompts(self._service, asked, choices)
        async with asyncio.TaskGroup() as texts:
            for choice in choices:
                texts.create_task(self._text(choice))
        if asked.include_usage:
            frame = self._answer.frame([], event=True)
            await self._data({**frame, "usage": usage_of(asked, choices), **speculation_of(choices)})

    async def _text(self, choice: AnswerChoice) -> None:
        """The events of one text."""
        answer, asked, offset = self._answer, self._answer.asked, 0
        if asked.chat:
            await self._event(choice, {"delta": {"role": "assistant", "content": ""}})
        if asked.echo:
            prompt, before = await self._service.turns.run(choice.owner, lambda: answer.echoed(choice))
            await self._event(choice, {"text": prompt, "logprobs": answer.logprobs(before)}, large=True)
            offset = len(prompt)
        unscored, written = Unscored(), 0
        while choice.stream is not None and (tokens := await choice.stream.read()):
            written += len(tokens)
            parts = choice.parts.feed(tokens)
            if parts or asked.tokens or asked.logprobs is not None:
                part = {**self._part(parts), "logprobs": answer.logprobs(of_tokens(tokens, offset))}
                usage = running_usage(asked, choice, written)
                await self._event(choice, part, {**self._tokens(tokens, unscored), **usage})
        await self._end(choice, unscored, written)

    async def _end(self, choice: AnswerChoice, unscored: Unscored, written: int) -> None:
        out, asked = choice.out, self._answer.asked
        report: dict[str, Any] = running_usage(asked, choice, written)
        if out is not None:
            report |= {"sprinter": {**self._tokens([], unscored).get("sprinter", {}), **sprinter_report(out)}}
        if not asked.include_usage and asked.count == 1:
            report |= speculation_of([choice])
        end = self._part(choice.parts.finish())
        await self._event(choice, {**end, "finish_reason": finish_of(choice)}, report)

    def _part(self, parts: dict[str, Any]) -> dict[str, Any]:
        """What is new in a text, in a choice."""
        return {"delta": parts} if self._answer.asked.chat else {"text": parts.get("content", "")}

    def _tokens(self, tokens: Sequence[Token], unscored: Unscored) -> dict[str, Any]:
        """What an event says about its tokens, and about earlier ones that have been scored since."""
        if not self._answer.asked.tokens:
            return {}
        settled = [token_report(token, i) for i, token in unscored.settled()]
        found = [token_report(token, i) for i, token in unscored.add(tokens)]
        return {"sprinter": {"tokens": found, "scored": settled}}

    async def _event(
        self, choice: AnswerChoice, part: dict[str, Any], more: dict[str, Any] | None = None, *, large: bool = False
    ) -> None:  # fmt: skip
        one = {"index": choice.index, "logprobs": None, "finish_reason": None, **part}
        value = {**self._answer.frame([one], event=True), **(more or {})}
        await self._data(value, choice.owner if large else None)

    async def _data(self, value: dict[str, Any], owner: str | None = None) -> None:
        """Send an event; a large one is made as it is read, in turns of its owner."""
        async with self._one_at_a_time:
            if owner is None:
                await self._body(f"data: {to_json(value)}\n\n".encode("utf-8", "replace"))
            else:
                parts = chain(["data: "], json_parts(value), ["\n\n"])
                await send_parts(self._service, owner, parts, self._body)

    async def _body(self, body: bytes, _: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
