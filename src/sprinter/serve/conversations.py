"""Messages and template arguments as clients send them, in the form that chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from sprinter.engine.chat import ChatMessage, template_reads
from sprinter.serve.api_errors import Refusal

__all__ = ["readable_messages", "template_arguments"]

_LABELS = (
    "name", "type", "id", "status", "refusal", "annotations", "audio", "function_call", "tool_call_id", "reasoning",
    "reasoning_content", "reasoning_details", "provider_specific_fields",
)  # fmt: skip
"""Fields of messages that clients send back or add, and that a template need not read."""
_NO_THINKING = ("none", "minimal")


def readable_messages(
    messages: Sequence[ChatMessage], tokenizer: PreTrainedTokenizerBase
) -> list[ChatMessage]:
    """Messages without labels that the template does not read, with the roles and arguments that it knows.

    The role developer is system's where the template has no other. Arguments of tool calls are objects, as templates
    write them, not JSON.
    """
    template = _template_of(tokenizer)
    return [_readable(one, template) if isinstance(one, Mapping) else one for one in messages]


def _template_of(tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any] = ()) -> str:
    if tokenizer.chat_template is None:
        message = (
            "this model has no chat template: ask for a completion, or start the server with --template FILE"
        )
        raise Refusal(400, message, "no_chat_template", "messages")
    return str(tokenizer.get_chat_template(None, list(tools) or None))


def _readable(message: ChatMessage, template: str) -> ChatMessage:
    found = {
        name: value
        for name, value in message.items()
        if name not in _LABELS or template_reads(template, name)
    }
    if found.get("role") == "developer" and not template_reads(template, "developer"):
        found["role"] = "system"
    calls = found.get("tool_calls")
    if isinstance(calls, list) and calls:
        found["tool_calls"] = [_with_object(call) for call in calls]
        if not found.get("content"):  # templates write calls in place of a content
            found.pop("content", None)
    return found


def _with_object(call: Any) -> Any:
    """A tool call whose arguments are an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def template_arguments(
    tokenizer: PreTrainedTokenizerBase,
    given: Mapping[str, Any] | None,
    tools: Sequence[Mapping[str, Any]],
    effort: str | None,
) -> dict[str, Any]:
    """The arguments of the chat template of a request.

    Args:
        given: ``chat_template_kwargs``. tools: for the answer. effort: ``reasoning_effort``.

    Raises:
        Refusal: the template does not read them, or they are not the client's.
    """
    found: dict[str, Any] = {**(given or {})}
    template = _template_of(tokenizer, tools)
    for name, field in (("chat_template", "the server's"), ("tools", "a field of the request")):
        if name in found:
            message = f"chat_template_kwargs has {name!r}, which is {field}: leave it out"
            raise Refusal(400, message, "invalid_field", "chat_template_kwargs")
    if tools:
        if not template_reads(template, "tools"):
            message = "this model's chat template does not read tools: leave it out, or ask a model trained for tools"
            raise Refusal(400, message, "unsupported_field", "tools")
        found["tools"] = list(tools)
    if effort is not None:
        if template_reads(template, "reasoning_effort"):
            found.setdefault("reasoning_effort", effort)
        elif template_reads(template, "enable_thinking"):
            found.setdefault("enable_thinking", effort not in _NO_THINKING)
        elif effort not in _NO_THINKING:
            message = "this model's chat template does not read reasoning_effort: leave it out"
            raise Refusal(400, message, "unsupported_field", "reasoning_effort")
    return found
