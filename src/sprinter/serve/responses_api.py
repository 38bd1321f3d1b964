"""OpenAI's responses: a request as a chat, and its answer as items, whole or in events. Nothing is stored."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from sprinter.serve.api_errors import Refusal, of_error, of_fields
from sprinter.serve.completion_streams import AnswerChoice, in_time
from sprinter.serve.events import Events
from sprinter.serve.message_parsing import joined
from sprinter.serve.responses import (
    ServerAnswer,
    finish_of,
    json_parts,
    send_parts,
    speculation_of,
    to_json,
    usage_of,
)
from sprinter.serve.schema import ChatRequest, NothingAsked, RequestObject, SprinterOptions
from sprinter.serve.speculation import sprinter_report

__all__ = ["ResponseAnswer", "ResponseEvents", "ResponsesRequest", "as_chat"]

_SAME = (
    "model", "temperature", "top_p", "seed", "stream", "parallel_tool_calls", "chat_template_kwargs", "sprinter",
)  # fmt: skip
"""Fields that chats have too."""
_TEXTS = ("input_text", "output_text", "text")
_ReasoningSummary = Literal["auto", "concise", "detailed"]


class ReasoningOptions(RequestObject):
    """``effort`` is for the chat template; summaries are not written."""

    effort: Annotated[str, Field(max_length=16)] | None = None
    summary: _ReasoningSummary | None = None
    generate_summary: _ReasoningSummary | None = None


class TextOptions(RequestObject):
    """What the text is to be."""

    format: dict[str, Any] | None = None  # as of chats, with what these have in "json_schema" beside the type
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(NothingAsked):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    model: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    sprinter: SprinterOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # there is none
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The request as a chat.

    Raises:
        Refusal: what chats refuse, and items of other kinds than messages, calls and their results.
    """
    given = body.model_dump(include={*_SAME}, exclude_none=True)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    given["messages"] = [*_messages(items)]
    if body.instructions:
        given["messages"].insert(0, {"role": "system", "content": body.instructions})
    if body.tools:
        given["tools"] = [
            {"type": "function", "function": {key: value for key, value in one.items() if key != "type"}}
            if one.get("type") == "function" else one
            for one in body.tools
        ]  # fmt: skip
    choice = body.tool_choice
    try:
        to_json([body.tools, choice, body.text and body.text.format])  # the answer repeats them
    except (ValueError, RecursionError):
        message = "tools, tool_choice or text hold numbers that are not finite, or are nested too deeply"
        raise Refusal(400, f"{message}: change them", "invalid_field", "tools") from None
    if isinstance(choice, dict) and "function" not in choice:
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    more: dict[str, Any] = {
        "max_completion_tokens": body.max_output_tokens,
        "tool_choice": choice,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": body.text and _format(body.text.format),
    }
    try:
        return ChatRequest(**given, **{key: value for key, value in more.items() if value is not None})
    except ValidationError as error:
        raise of_fields(error.errors(), ChatRequest) from None


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in given.items() if key != "type"},
    }


def _messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    calls: list[dict[str, Any]] = []  # of one message
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            continue
        if calls and kind != "reasoning":
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if kind == "message":
            yield {"role": item.get("role"), "content": _content(item.get("content"))}
        elif kind == "function_call_output":
            yield {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": _content(item.get("output")),
            }
        elif kind != "reasoning":  # earlier reasoning is no part of a conversation
            raise Refusal(
                400, f"an item of type {str(kind)[:40]!r} is not supported: leave it out", param="input"
            )
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _content(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    return [
        {**one, "type": "text"} if isinstance(one, dict) and one.get("type") in _TEXTS else one
        for one in given
    ]


@dataclass(frozen=True, slots=True)
class ResponseAnswer(ServerAnswer):
    """The frame of a response. ``body``: the request."""

    body: ResponsesRequest = field(kw_only=True)

    def response(
        self, status: str, output: Sequence[Any], choices: Sequence[AnswerChoice] = ()
    ) -> dict[str, Any]:
        """The response with these items; ``choices``: its text, once it has ended."""
        body, used = self.body, usage_of(self.asked, choices) if choices else None
        found: dict[str, Any] = {
            "id": f"resp_{self.id}", "object": "response", "created_at": self.created, "status": status,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self.model,
            "output": output, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "temperature": self.asked.options.temperature,
            "top_p": self.asked.options.top_p, "tool_choice": body.tool_choice or "auto", "tools": body.tools or [],
            "truncation": "disabled", "metadata": {}, "store": False,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        }  # fmt: skip
        if used is not None:
            details = used.get("completion_tokens_details", {"reasoning_tokens": 0})
            found["usage"] = {
                "input_tokens": used["prompt_tokens"], "input_tokens_details": used["prompt_tokens_details"],
                "output_tokens": used["completion_tokens"], "output_tokens_details": details,
                "total_tokens": used["total_tokens"],
            }  # fmt: skip
            (choice,) = choices
            found |= speculation_of(choices)
            found["sprinter"] = None if choice.out is None else sprinter_report(choice.out)
        return found

    def ended(self, writer: Items, choice: AnswerChoice) -> dict[str, Any]:
        """The response at its end."""
        status = "incomplete" if finish_of(choice) == "length" else "completed"
        return self.response(status, writer.items, [choice])

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """The answer as one object."""
        (choice,), writer = choices, Items()
        assert choice.out is not None
        for _ in writer.add(joined([choice.parts.feed(choice.out.tokens), choice.parts.finish()])):
            pass
        for _ in writer.close():
            pass
        return self.ended(writer, choice)


class Items:
    """The items of a response, and the events that say how they come to be."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = ""  # kind of the last item, while it is written

    def add(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a delta of a chat."""
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            if text := delta.get(name):
                if self._open != kind:
                    yield from self.close()
                    yield from self._begin(kind)
                part = self.items[-1]["content"][0]
                part["text"] += text
                yield self._event(_DELTAS[kind], delta=text)
        for call in delta.get("tool_calls", ()):
            yield from self.close()
            item = {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "status": "in_progress",
                    "call_id": call["id"], "name": call["function"]["name"], "arguments": ""}  # fmt: skip
            self.items.append(item)
            yield self._event("response.output_item.added", item={**item})
            item |= {"status": "completed", "arguments": call["function"]["arguments"]}
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.delta", delta=arguments)
            yield self._event("response.function_call_arguments.done", arguments=arguments, name=item["name"])
            yield self._event("response.output_item.done", item={**item})

    def _begin(self, kind: str) -> Iterator[dict[str, Any]]:
        self._open = kind
        item: dict[str, Any] = {"id": f"{kind[:3]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress"}
        own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= own
        self.items.append({**item, "content": [_part(kind)]})
        yield self._event("response.output_item.added", item={**item, "content": []})
        yield self._event("response.content_part.added", part=_part(kind))

    def close(self) -> Iterator[dict[str, Any]]:
        """The events of the end of the last item."""
        if not self._open:
            return
        item, kind, self._open = self.items[-1], self._open, ""
        item["status"] = "completed"
        (part,) = item["content"]
        yield self._event(_DELTAS[kind].replace(".delta", ".done"), text=part["text"])
        yield self._event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        found = {"type": kind, "output_index": len(self.items) - 1, **more}
        if "item" not in more:
            found["item_id"] = self.items[-1]["id"]
            if "arguments" not in kind:
                found["content_index"] = 0
        if "output_text" in kind:
            found["logprobs"] = []
        return found


_DELTAS = {"reasoning": "response.reasoning_text.delta", "message": "response.output_text.delta"}


def _part(kind: str) -> dict[str, Any]:
    own: dict[str, Any] = {"annotations": []} if kind == "message" else {}
    return {"type": "output_text" if own else "reasoning_text", "text": "", **own}


class ResponseEvents(Events):
    """The response that writes the events of one response of OpenAI's, to one client."""

    _number = 0

    async def _write_all(self, deadline: float) -> None:
        try:
            await in_time(self._service, self._write(), deadline)
        except Exception as error:
            refused = of_error(error).body()["error"]
            await self._say(
                {"type": "error", "code": refused["code"], "message": refused["message"], "param": None}
            )

    async def _write(self) -> None:
        (choice,), answer, writer = self._choices, self._answer, Items()
        assert isinstance(answer, ResponseAnswer) and choice.stream is not None
        for kind in ("created", "in_progress"):
            await self._say({"type": f"response.{kind}", "response": answer.response("in_progress", [])})
        while tokens := await choice.stream.read():
            for event in writer.add(choice.parts.feed(tokens)):
                await self._say(event)
        for event in (*writer.add(choice.parts.finish()), *writer.close()):
            await self._say(event)
        ended = answer.ended(writer, choice)
        await self._say({"type": f"response.{ended['status']}", "response": ended})

    async def _say(self, event: dict[str, Any]) -> None:
        value = {**event, "sequence_number": self._number}
        self._number += 1
        before, after = f"event: {event['type']}\ndata: ", "\n\n"
        if "response" in event and self._note.is_large:  # it repeats the request's tools
            parts = chain([before], json_parts(value), [after])
            await send_parts(self._service, self._choices[0].owner, parts, self._body)
        else:
            await self._body(f"{before}{to_json(value)}{after}".encode("utf-8", "replace"))
