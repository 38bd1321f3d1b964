"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sprinter.decode.registry import nearest
from sprinter.errors import (
    ClosedEngineError,
    ContextLengthError,
    DeadEngineError,
    NoMemoryError,
    QueueFullError,
    SprinterError,
    UserError,
)
from sprinter.parameters import complaint
from sprinter.serve.schema import RequestObject, fields_of

__all__ = ["Refusal", "of_error", "of_fields", "too_long"]

_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names of options in our messages -> fields of a request."""
_MOST = 500  # characters of a message
_ALIKE = 0.7  # of a field that was meant: less would take "user" for "seed"
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_KINDS = ("str", "int", "float", "bool")
"""Names of the alternatives of a field that has several types, which pydantic adds to the place of a mistake."""
_DIRECTORIES = re.compile(r"(?<![\w.@+~:/-])/(?!v\d/)(?:[\w.@+~-]+/)+(?=[\w.@+~-])")
"""The directories of an absolute path; no URLs, and no paths of this server."""


class Refusal(Exception):
    """A request that is not served.

    Args:
        status: HTTP status code, from which OpenAI's type of error follows. code, param: as in OpenAI's errors.
        retry_after_s: when to try again; None: not at all.
    """

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message = status, message
        self.code, self.param, self.retry_after_s = code, param, retry_after_s

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        message = self.message if len(self.message) <= _MOST else f"{self.message[:_MOST]}..."
        message = message.encode("utf-8", "replace").decode()  # half of a surrogate pair cannot be sent
        kind = "server_error" if self.status >= 500 else _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that belong to it."""
        found = {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def too_long(most: int, what: str, param: str) -> Refusal:
    """The refusal of a prompt that is too long, in the words by which clients know it."""
    message = f"this model's maximum context length is {most} tokens here, and {what}: shorten it"
    return Refusal(400, message, "context_length_exceeded", param)


def of_error(error: Exception) -> Refusal:
    """The refusal that an exception stands for; its text is shown only if it is one of ours.

    Of a group of exceptions, the first one counts.
    """
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    match error:
        case Refusal():
            return error
        case ContextLengthError():
            return Refusal(400, _in_fields(str(error)), "context_length_exceeded", "prompt")
        case UserError():
            return Refusal(400, _in_fields(str(error)))
        case QueueFullError():
            return Refusal(
                429, str(error), "queue_full", retry_after_s=max(1, math.ceil(error.retry_after_s))
            )
        case NoMemoryError():
            return Refusal(503, str(error), "no_memory", retry_after_s=5)
        case ClosedEngineError():
            return Refusal(503, "the server is about to end", "closing", retry_after_s=10)
        case DeadEngineError():
            return Refusal(503, "the model has failed", "engine_failed")
        case SprinterError():
            return Refusal(500, str(error), "generation_failed")
    return Refusal(500, "the server has failed at this request", "internal_error")


def of_fields(errors: Sequence[Mapping[str, Any]], body: type[RequestObject]) -> Refusal:
    """The refusal for a body that the schema refuses; it repeats nothing of the body but names of fields."""
    fields = fields_of(body)
    name = _place(errors[0]).partition(".")[0]
    own = [error for error in errors if _place(error).partition(".")[0] == name]
    # of a field with several types, the mistake within the type that was given
    first = next((error for error in own if not error["type"].endswith("_type")), errors[0])
    if first["type"] == "json_invalid":
        return Refusal(400, "the body is not JSON", "invalid_field")
    name = _place(first)
    if first["type"] == "extra_forbidden":
        known = {place.rpartition(".")[2]: place for place in fields}
        near = nearest(name.rpartition(".")[2], known, _ALIKE)
        hint = "leave it out" if near is None else f"did you mean {known[near]!r}? Else leave it out"
        return Refusal(400, f"the field {name!r} is not supported: {hint}", "unsupported_field", name)
    message = f"{name}: {first['msg']}" if name else str(first["msg"])
    if name in fields and (said := complaint(first, fields[name])) is not None:
        message = f"{name} {said}"
    return Refusal(400, message, "invalid_field", name or None)


def _place(error: Mapping[str, Any]) -> str:
    """The field of an error of pydantic, by names and numbers joined by dots."""
    place = (str(part) for part in error["loc"] if part not in ("body", *_KINDS))
    return ".".join(part for part in place if part.isidentifier() or part.isdecimal())[:80]


def _in_fields(message: str) -> str:
    """A message of ours for a client: fields in place of options, and no directory of this machine."""
    message = _DIRECTORIES.sub("", message)
    for ours, field in _NAMES.items():
        message = message.replace(ours, field)
    return message
