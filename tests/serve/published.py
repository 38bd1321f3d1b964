"""JSON Schemas of the answers that OpenAI's published OpenAPI description gives for the served paths.

Objects are open, as there: an engine may add fields. Required and nullable are as published; the log-probability of a
token may also be null in a stream (a trusted token that the target has not scored yet).
"""

from __future__ import annotations

from typing import Any

__all__ = ["CHAT", "CHAT_CHUNK", "COMPLETION", "COMPLETION_CHUNK", "ERROR", "MODEL", "MODELS"]

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FINISH = ["stop", "length", "tool_calls", "content_filter", "function_call"]


def closed(values: list[str]) -> Schema:
    return {"type": "string", "enum": values}


def either(schema: Schema) -> Schema:
    """The schema, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def entries(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {"type": "object", "properties": required | (optional or {}), "required": [*required]}


USAGE = record(
    dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), COUNT),
    {"prompt_tokens_details": record({}, {"cached_tokens": COUNT, "audio_tokens": COUNT})},
)
LOGPROB = either({"type": "number", "maximum": 0})
ONE_TOKEN = {
    "token": STRING,
    "logprob": LOGPROB,
    "bytes": either(entries({"type": "integer", "minimum": 0, "maximum": 255})),
}
CHAT_LOGPROBS = either(
    record(
        {
            "content": either(entries(record(ONE_TOKEN | {"top_logprobs": entries(record(ONE_TOKEN))}))),
            "refusal": either(entries(record(ONE_TOKEN))),
        }
    )
)
TEXT_LOGPROBS = either(
    record(
        {},
        {
            "tokens": entries(STRING),
            "token_logprobs": entries(LOGPROB),
            "top_logprobs": entries(either({"type": "object", "additionalProperties": {"type": "number"}})),
            "text_offset": entries(COUNT),
        },
    )
)


def answer(kind: str, choice: Schema, usage: Schema = USAGE) -> Schema:
    """The object around choices."""
    frame = {"id": STRING, "object": closed([kind]), "created": COUNT, "model": STRING}
    return record(frame | {"choices": entries(choice)}, {"usage": usage, "system_fingerprint": STRING})


MESSAGE = record({"role": closed(["assistant"]), "content": either(STRING), "refusal": either(STRING)})
DELTA = record({}, {"role": closed(["assistant"]), "content": either(STRING), "refusal": either(STRING)})
CHAT = answer(
    "chat.completion",
    record({"finish_reason": closed(FINISH), "index": COUNT, "message": MESSAGE, "logprobs": CHAT_LOGPROBS}),
)
CHAT_CHUNK = answer(
    "chat.completion.chunk",
    record(
        {"delta": DELTA, "finish_reason": either(closed(FINISH)), "index": COUNT}, {"logprobs": CHAT_LOGPROBS}
    ),
    either(USAGE),
)


def completion(finish: Schema) -> Schema:
    part = {"finish_reason": finish, "index": COUNT, "logprobs": TEXT_LOGPROBS, "text": STRING}
    return answer("text_completion", record(part))


COMPLETION = completion(closed(["stop", "length", "content_filter"]))
COMPLETION_CHUNK = completion(either(closed(["stop", "length", "content_filter"])))
MODEL = record({"id": STRING, "object": closed(["model"]), "created": COUNT, "owned_by": STRING})
MODELS = record({"object": closed(["list"]), "data": entries(MODEL)})
ERROR = record(
    {"error": record({"type": STRING, "message": STRING, "param": either(STRING), "code": either(STRING)})}
)
