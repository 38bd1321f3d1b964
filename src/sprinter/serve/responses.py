"""Answers in OpenAI's shapes: whole ones, and the parts that they share with events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sprinter.engine.generation import Generation
from sprinter.serve.completion_streams import AnswerChoice, ClientLeft, while_connected
from sprinter.serve.logprobs import (
    LawfulToken,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    of_prompt,
    of_tokens,
)
from sprinter.serve.message_parsing import joined
from sprinter.serve.request_parsing import TextRequest
from sprinter.serve.service import Service
from sprinter.serve.speculation import llamacpp_timings, sprinter_report, token_report, vllm_metrics
from sprinter.version import __version__

__all__ = [
    "BytesParts", "JsonParts", "ServerAnswer", "finish_of", "json_parts", "running_usage", "send_parts",
    "speculation_of", "to_json", "usage_of",
]  # fmt: skip

_PART_BYTES, _SMALL_BYTES = 2**16, 2**13  # of a piece; where other owners ask too
_TOGETHER = 32  # items of a list that are written in one call

_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The frame of an answer, the same in all of its events.

    Attributes:
        id: of the request. created: time in seconds since 1970. model: its name. names: of tokens.
    """

    asked: TextRequest
    id: str
    created: int
    model: str
    names: TokenNames = field(repr=False)

    def frame(self, choices: Iterable[dict[str, Any]], *, event: bool = False) -> dict[str, Any]:
        """The object around choices."""
        kind = "chat.completion" if self.asked.chat else "text_completion"
        return {
            "id": f"{'chatcmpl' if self.asked.chat else 'cmpl'}-{self.id}",
            "object": f"{kind}.chunk" if event and self.asked.chat else kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"sprinter-{__version__}",
            "choices": choices,
        }

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The answer as one object; what is long in it are iterators, so that parts are made as they are written."""
        return {
            **self.frame(map(self._choice, choices)),
            "usage": usage_of(self.asked, choices),
            **speculation_of(choices),
        }

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        out = choice.out
        prompt, before = self.echoed(choice) if self.asked.echo else ("", [])
        parts = {} if out is None else joined([choice.parts.feed(out.tokens), choice.parts.finish()])
        text = prompt + parts.pop("content", "")
        tokens = [*before, *of_tokens([] if out is None else out.tokens, len(prompt))]
        found: dict[str, Any] = {"index": choice.index, "logprobs": self.logprobs(tokens)}
        if self.asked.chat:
            for call in parts.get("tool_calls", ()):
                del call["index"]
            found["message"] = {
                "role": "assistant", "content": text if text or not parts else None, "refusal": None, **parts,
            }  # fmt: skip
        else:
            found["text"] = text
        found["finish_reason"] = finish_of(choice)
        if out is not None:
            report = sprinter_report(out)
            if self.asked.tokens:
                report["tokens"] = (token_report(token, i) for i, token in enumerate(out.tokens))
            found["sprinter"] = report
        return found

    def echoed(self, choice: AnswerChoice) -> tuple[str, list[LawfulToken]]:
        """The prompt as text and, where they are needed, its tokens."""
        text = choice.prompt.text
        if text is not None and self.asked.logprobs is None:
            return text, []
        tokens = of_prompt(choice.prompt, choice.scored, self.names.tokenizer)
        return "".join(token.text for token in tokens) if text is None else text, tokens

    def logprobs(self, tokens: Sequence[LawfulToken]) -> dict[str, Any] | None:
        """The object ``logprobs`` of a choice; None if it was not asked for."""
        if self.asked.logprobs is None:
            return None
        if self.asked.chat:
            return chat_logprobs(tokens, self.names)
        return completion_logprobs(tokens, self.names)


def finish_of(choice: AnswerChoice) -> str:
    """OpenAI's reason why a text ended."""
    if (out := choice.out) is None:
        return "length"
    found = _FINISH.get(out.finish_reason, out.finish_reason)
    return "tool_calls" if found == "stop" and choice.parts.calls else found


def _outs(choices: Sequence[AnswerChoice]) -> list[Generation]:
    return [choice.out for choice in choices if choice.out is not None]


def usage_of(asked: TextRequest, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Numbers of tokens; a prompt counts once, whatever the number of its texts."""
    outs = _outs(choices)
    prompt = sum(len(choice.prompt.ids) for choice in choices[:: asked.n])
    written = sum(out.stats.new_tokens for out in outs)
    thought = sum(choice.parts.reasoning_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(out.stats.cached_tokens for out in outs[:: asked.n])},
        **({"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}),
    }


def running_usage(asked: TextRequest, choice: AnswerChoice, written: int) -> dict[str, Any]:
    """The usage of a text so far, if its events are to have it."""
    prompt = len(choice.prompt.ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    return {"usage": usage} if asked.running_usage else {}


def speculation_of(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """vLLM's ``metrics`` and llama.cpp's ``timings``."""
    outs = _outs(choices)
    if not outs:
        return {}
    return {"metrics": {"speculative_decoding": vllm_metrics(outs)}, "timings": llamacpp_timings(outs)}


def json_parts(value: Any, levels: int = 5) -> Iterator[str]:
    """JSON of a value, in parts that are written one by one: one call for all would hold the interpreter's lock.

    Args:
        value: what JSON knows, and iterators, as lists. levels: objects and lists around a part, at most.
    """
    if levels and isinstance(value, dict):
        for i, (key, one) in enumerate(value.items()):
            yield f"{',' if i else '{'}{to_json(key)}:"
            yield from json_parts(one, levels - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list | Iterator):
        items, size, before = iter(value), _TOGETHER if levels < 2 else 1, "["
        while some := list(islice(items, size)):
            if size == 1:
                yield before
                yield from json_parts(some[0], levels - 1)
            else:
                yield f"{before}{to_json(some)[1:-1]}"
            before = ","
        yield "[]" if before == "[" else "]"
    else:
        yield to_json(value)


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=list)


def to_json(value: Any) -> str:
    """JSON of what JSON knows, and of iterators as lists, in one call: it holds the interpreter's lock meanwhile."""
    return _ENCODER.encode(value)


def _pieces(parts: Iterable[str], size: int) -> Iterator[bytes]:
    """Parts together, in pieces of at least so many bytes; the last one is smaller."""
    piece = bytearray()
    for part in parts:
        piece += part.encode("utf-8", "replace")
        if len(piece) >= size:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


async def send_parts(
    service: Service, owner: str, parts: Iterable[str], send: Callable[[bytes, bool], Awaitable[None]]
) -> None:
    """Make parts in turns with other owners' work, and send what has been made before more is.

    Args:
        send: gets a piece, and whether more follow.
    """
    size = _SMALL_BYTES if service.turns.crowded(owner) else _PART_BYTES
    pieces, more = _pieces(parts, size), True
    while more:
        piece = await service.turns.run(owner, lambda: next(pieces))
        more = len(piece) >= size
        await send(piece, more)


class BytesParts(Response):
    """An answer in bytes, which is sent as it is read: one that is not read ends with its request's time."""

    media_type = "application/octet-stream"

    def __init__(self, parts: Sequence[memoryview]) -> None:
        super().__init__()
        self.headers["content-length"] = str(sum(map(len, parts)))
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in self._parts:
            for at in range(0, len(part), _PART_BYTES):
                piece = bytes(part[at : at + _PART_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class JsonParts(Response):
    """A JSON answer of any size, which is made as it is read.

    Args:
        make: the value, called in another thread than the event loop's. owner: whose turns it takes.
        headers: those of the answer, beside its type and length.
    """

    media_type = "application/json"

    def __init__(
        self, service: Service, owner: str, make: Callable[[], Any], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(headers=headers)
        del self.headers["content-length"]
        self._service, self._owner, self._make = service, owner, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def piece(body: bytes, more: bool) -> None:
            nonlocal begun
            if not begun:
                if not more:
                    self.headers["content-length"] = str(len(body))
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            begun = True
            await send({"type": "http.response.body", "body": body, "more_body": more})

        with suppress(ClientLeft):
            await while_connected(receive, send_parts(self._service, self._owner, self._parts(), piece))

    def _parts(self) -> Iterator[str]:
        yield from json_parts(self._make())
