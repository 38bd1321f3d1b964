"""What a request must pass before a route sees it: host, key, rate, type and size of its body, time to send it."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sprinter.serve.choices import ClientLeft
from sprinter.serve.keys import ApiKeys, RateLimit
from sprinter.serve.logs import error_fields
from sprinter.serve.prometheus import ServeMetrics
from sprinter.serve.refusals import Refusal, of_error
from sprinter.serve.settings import ServeSettings
from sprinter.serve.static_files import PATHS

__all__ = ["RequestGuard", "RequestNote", "note_of"]

_OPEN = frozenset({"/health", "/ready"}) | PATHS  # need no key, and no rate is counted
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_DISCARDED = 256 * 2**20
_log = logging.getLogger("sprinter.serve")


class RequestNote:
    """What is known about a request beside its body.

    Attributes:
        id: from the header X-Request-ID, or a new one.
        owner: name of the key's owner; without keys, the client's address.
        fields: what its line in the log says.
        path: the route's path, for metrics.
        status, complete: of the answer: its HTTP status (0: none yet), and whether it is complete.
    """

    def __init__(self, id: str) -> None:
        self.id, self.owner, self.path = id, "", "other"
        self.fields: dict[str, Any] = {}
        self.status, self.complete = 0, False


def note_of(scope: Scope) -> RequestNote:
    """The note of a request that has passed the guard."""
    note = scope["sprinter.note"]
    assert isinstance(note, RequestNote)
    return note


class RequestGuard:
    """ASGI middleware around the routes.

    Args:
        app: the routes. settings: limits. metrics: counts requests.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, metrics: ServeMetrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._keys = None if settings.api_keys is None else ApiKeys(settings.api_keys)
        self._rates = None if settings.rate_limit is None else RateLimit(settings.rate_limit)
        self._hosts = _LOOPBACK | {settings.host, *settings.allowed_hosts}
        # A server that all may reach under any name has no names to check.
        self._any_host = "*" in settings.allowed_hosts or not settings.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        note = RequestNote(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        scope["sprinter.note"] = note

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = note.id
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                note.complete = True
            await send(message)

        try:
            self._check(scope, headers, note)
            body = await self._read(headers, receive)
            await self._app(scope, _again(body, receive), noted)
        except ClientLeft:
            note.status = note.status or 499
        except Exception as error:
            if note.complete:
                return  # the routes have answered and logged it
            if not isinstance(error, Refusal):
                _log.error("failed", extra={"fields": {"id": note.id, **error_fields(error)}})
            if note.status:
                raise  # the answer has begun: the connection is closed
            refusal = of_error(error)
            response = JSONResponse(refusal.body(), refusal.status, refusal.headers | {"connection": "close"})
            await response(scope, receive, noted)
        finally:
            self._end(scope, note, time.perf_counter() - began)

    def _end(self, scope: Scope, note: RequestNote, wall_s: float) -> None:
        self._metrics.answered(note.path, note.status)
        fields = {
            "id": note.id, "method_http": scope["method"], "path": note.path, "status": note.status,
            "owner": note.owner, "wall_s": round(wall_s, 6), **note.fields,
        }  # fmt: skip
        _log.log(logging.DEBUG if note.path in _OPEN else logging.INFO, "request", extra={"fields": fields})

    def _check(self, scope: Scope, headers: Headers, note: RequestNote) -> None:
        """Refuse a request by its header."""
        host = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if not self._any_host and host not in self._hosts:
            raise Refusal(
                403,
                "this server does not answer to that name: start it with allowed_hosts",
                code="wrong_host",
            )
        client = scope.get("client")
        note.owner = client[0] if client else "unknown"
        if scope["path"] in _OPEN:
            return
        if self._keys is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            owner = self._keys.owner(key.strip()) if scheme.lower() == "bearer" else None
            if owner is None:
                raise Refusal(
                    401, "the key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                    kind="authentication_error", code="invalid_api_key",
                )  # fmt: skip
            note.owner = owner
        if self._rates is not None and (wait := self._rates.wait_s(note.owner)):
            raise Refusal(
                429, f"more than {self._settings.rate_limit} requests a minute: slow down",
                kind="rate_limit_error", code="rate_limit_exceeded", retry_after_s=math.ceil(wait),
            )  # fmt: skip
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":  # a browser's form needs no permission
            raise Refusal(415, "the body is to be application/json", code="unsupported_media_type")

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body.

        Raises:
            Refusal: it is too large or too slow. ClientLeft: the client has left.
        """
        most, parts, size = self._settings.max_body_bytes, list[bytes](), 0
        declared = headers.get("content-length", "0")
        too_large = declared.isdecimal() and int(declared) > most
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                more = True
                while more and size <= _MOST_DISCARDED:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    too_large = too_large or size > most
                    if too_large:
                        parts.clear()  # read on, so that the client can send it and see the answer
                    else:
                        parts.append(part)
        except TimeoutError:
            if not too_large:
                raise Refusal(
                    408, "the body took too long to arrive", code="timeout", retry_after_s=1
                ) from None
        if too_large:
            raise Refusal(413, f"the body is larger than {most} bytes: send less", code="body_too_large")
        return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body that was read, and then what follows."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
