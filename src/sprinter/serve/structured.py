"""What a text must be, as options of generation: OpenAI's ``response_format``, vLLM's ``structured_outputs``, forced
calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sprinter.serve.api_errors import Refusal
from sprinter.serve.schema import ChatRequest, GenerateRequest, NamedTool

__all__ = ["forced_tool", "structure_of"]

_PLAIN = {
    "type", "properties", "required", "title", "description", "$schema", "$defs", "definitions", "strict",
}  # fmt: skip
"""Keywords of a schema that say nothing of parameters beside those it lists."""


def structure_of(body: GenerateRequest) -> dict[str, Any]:
    """The options that confine a text; empty: none was asked for.

    Raises:
        Refusal: several fields ask for one. It names no such tool.
    """
    found: dict[str, Any] = {}
    asked = body.structured_outputs
    if asked is not None:
        given = asked.model_dump(exclude_none=True)
        if (schema := given.pop("json_schema", None)) is not None:
            found["response_format"] = _schema(schema)
        if given.pop("json_object", False):
            found["response_format"] = {"type": "json_object"}
        found |= {"choices" if name == "choice" else name: value for name, value in given.items()}
    form, count = body.response_format, len(found)
    if form is not None and form.type != "text":
        found["response_format"] = form.model_dump(exclude_none=True, by_alias=True)
        count += 1
    if isinstance(body, ChatRequest) and (name := forced_tool(body)) is not None:
        try:
            found["response_format"] = _schema(_call_schema(body, name))
        except RecursionError:
            message = "the parameters of a tool are nested too deeply: simplify them"
            raise Refusal(400, message, "invalid_field", "tools") from None
        count += 1
    if count > 1:
        message = "response_format, structured_outputs and a forced tool_choice exclude each other: give one of them"
        raise Refusal(400, message, "invalid_field", "response_format")
    return found


def forced_tool(body: ChatRequest) -> str | None:
    """The tool that must be called; "": any; None: the text need not be a call.

    Raises:
        Refusal: there is no such tool.
    """
    choice, names = body.tool_choice, [one.function.name for one in body.tools or ()]
    if not isinstance(choice, NamedTool):
        if choice == "required" and not names:
            raise Refusal(
                400, "tool_choice='required' goes with tools: give some", "invalid_field", "tool_choice"
            )
        return "" if choice == "required" else None
    if choice.function.name not in names:
        message = f"tool_choice names {choice.function.name!r}, which is none of the tools: give one of them"
        raise Refusal(400, message, "invalid_field", "tool_choice")
    return choice.function.name


def _schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "text", "schema": schema}}


def _call_schema(body: ChatRequest, name: str) -> Any:
    """The schema of a named tool's arguments, or of a list of calls."""
    tools = [one.function for one in body.tools or ()]
    if name:
        return _arguments(next(one for one in tools if one.name == name).parameters)
    calls: Sequence[Any] = [
        {
            "type": "object", "required": ["name", "arguments"], "additionalProperties": False,
            "properties": {
                "name": {"const": one.name},
                "arguments": _moved(_arguments(one.parameters), f"#/items/anyOf/{i}/properties/arguments"),
            },
        }
        for i, one in enumerate(tools)
    ]  # fmt: skip
    most = {} if body.parallel_tool_calls is not False else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}


def _arguments(schema: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of a call's arguments: where it says nothing of others, those that it lists, as for a function."""
    if not schema:
        return {"type": "object"}
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list) or not schema.keys() <= _PLAIN:
        return schema
    names = [*listed]  # what is required may be no name
    return schema | {"additionalProperties": False} if all(one in names for one in required) else schema


def _moved(schema: Any, place: str) -> Any:
    """A schema as a part of another one, at a place to which its own references lead."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }
