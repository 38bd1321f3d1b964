"""What a request must pass before a route sees it: host, key, rate, type, size and shape of its body, time to send it.

The guard also cuts answers that are not read, and answers HEAD as GET without a body.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sprinter.engine.fair_queue import Shares
from sprinter.serve.api_errors import Refusal, of_error
from sprinter.serve.completion_streams import ClientLeft
from sprinter.serve.logs import error_fields
from sprinter.serve.registry import Models
from sprinter.serve.service import Service

__all__ = ["RequestGuard", "RequestNote", "check_shape", "network_of", "note_of"]

_OPEN = frozenset(
    {"/health", "/ready", "/"}
)  # need no key, and no rate is counted, as what the page is made of
_OPEN_FOLDER = "/static/"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_DISCARDED = 256 * 2**20
_MOST_HELD = 64 * 2**20  # of bodies whose requests are not answered, all together, or four of the largest
_SMALL = 2**16  # a body up to this size is checked at once
_VALUE_BYTES = 16  # more that a value takes in lists than in a body
_MOST_OBJECTS, _MOST_STRINGS, _MOST_VALUES = 2**14, 2**15, 2**17  # of one body
_PACE_S = 0.005  # between requests without a key, of an address to a path, where others with keys are open
_FAREWELL_S = 1.0  # to send an error after the time limit
_log = logging.getLogger("sprinter.serve")


@dataclass(slots=True, eq=False)
class RequestNote:
    """What is known about a request beside its body.

    Attributes:
        id: from the header X-Request-ID, or a new one.
        owner: name of the key's owner; without keys, the client's address.
        fields: what its line in the log says.
        open_to_all: whether it needs no key, and no rate is counted.
        deadline: when its time is over, in seconds of the event loop's clock.
        status, complete: of the answer: its HTTP status (0: none yet), and whether it is complete, or was cut.
        open, asking, held: places that it has of open requests, of those whose answer is not complete, and of bytes of
            bodies.
        after: called when it is over.
        first: called when it has its first text, for which others wait; None: they do not.
    """

    id: str
    deadline: float
    open_to_all: bool
    owner: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    complete: bool = False
    open: int = 0
    asking: int = 0
    held: int = 0
    after: list[Callable[[], None]] = field(default_factory=list)
    first: Callable[[], None] | None = None

    @property
    def is_large(self) -> bool:
        """Whether work on the body is to be done beside the event loop."""
        return self.held > _SMALL


def note_of(scope: Scope) -> RequestNote:
    """The note of a request that has passed the guard."""
    note = scope["sprinter.note"]
    assert isinstance(note, RequestNote)
    return note


class RequestGuard:
    """ASGI middleware around the routes.

    Args:
        app: the routes. service: what they serve; its settings are the limits.
    """

    def __init__(self, app: ASGIApp, service: Service | Models) -> None:
        self._app, self._service, self._settings = app, service, service.settings
        settings, self._owners, self._keys = service.settings, service.owners, service.owners.keys
        self._open = service.owners.open
        # bytes of bodies, until their request is answered: what is read from them is as large, or larger
        self._held = Shares(max(_MOST_HELD, 4 * settings.max_body_bytes), shared=settings.has_owners)
        self._next = asyncio.Lock()
        self._lines = Counter[str]()  # requests that wait for it
        self._hosts = _LOOPBACK | {name.lower() for name in (settings.host, *settings.allowed_hosts)}
        # A server that all may reach under any name has no names to check.
        self._any_host = "*" in settings.allowed_hosts or not settings.is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, began = Headers(scope=scope), time.perf_counter()
        given = headers.get("x-request-id", "")
        keyless = scope["path"] in _OPEN or scope["path"].startswith(_OPEN_FOLDER)
        seconds = self._settings.body_timeout_s if keyless else self._settings.request_timeout_s
        deadline = asyncio.get_running_loop().time() + seconds
        note = RequestNote(given if _ID.fullmatch(given) else uuid.uuid4().hex, deadline, keyless)
        scope["sprinter.note"], head = note, scope["method"] == "HEAD"
        scope = {**scope, "method": "GET"} if head else scope

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # what costs next to nothing could be asked for a thousand times a second
                if note.open and (message["status"] >= 400 or scope["method"] == "GET"):
                    await self._owners.turns.pause(f"{note.owner} pauses", note.owner)
                note.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = note.id
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                note.complete = True
                self._complete(note)  # before its client may ask on
            try:
                async with asyncio.timeout_at(deadline + _FAREWELL_S):
                    await send({**message, "body": b""} if head and "body" in message else message)
            except TimeoutError:  # the client does not read
                note.complete = True
                scope.get("sprinter.abort", lambda: None)()
                raise ClientLeft from None

        try:
            await self._let_in(scope, headers, note)
            body = b"" if keyless else await self._read(headers, receive, note)
            await self._app(scope, _again(body, receive), noted)
            if note.open and not note.complete:
                raise ClientLeft
        except ClientLeft:
            note.status = note.status or 499
            if note.open:  # its key's next requests wait
                await self._owners.turns.pause(note.owner, note.owner)
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
            self._complete(note)
            self._open.take(note.owner, -note.open)
            self._held.take(note.owner, -note.held)
            for leave in note.after:
                leave()
            self._end(scope, note, time.perf_counter() - began)

    def _complete(self, note: RequestNote) -> None:
        self._owners.asking.take(note.owner, -note.asking)
        note.asking = 0

    def _end(self, scope: Scope, note: RequestNote, wall_s: float) -> None:
        path = getattr(scope.get("route"), "path", "other")  # the route's, of which there are few
        self._owners.metrics.answered(path, note.status)
        fields = {
            "id": note.id, "method_http": scope["method"], "path": path, "status": note.status,
            "owner": note.owner, "wall_s": round(wall_s, 6), **note.fields,
        }  # fmt: skip
        _log.log(logging.DEBUG if note.open_to_all else logging.INFO, "request", extra={"fields": fields})

    async def _let_in(self, scope: Scope, headers: Headers, note: RequestNote) -> None:
        """Check the header; what has no key, or is refused, is not counted, and waits for its turn instead."""
        try:
            self._check(scope, headers, note)
        except Refusal:
            await self._line_up(f"{note.owner} refused", scope, _PACE_S)
            raise
        if not note.open:
            # one line for a folder: a client must not make more of them by names of files
            place = scope["path"] if scope["path"] in _OPEN else _OPEN_FOLDER
            await self._line_up(f"{note.owner} {place}", scope, _PACE_S)

    def _check(self, scope: Scope, headers: Headers, note: RequestNote) -> None:
        """Refuse a request by its header."""
        host = re.sub(r":\d+$", "", headers.get("host", "")).strip("[]").lower()
        if not self._any_host and host not in self._hosts:
            raise Refusal(
                403, "this server does not answer to that name: start it with allowed_hosts", "wrong_host"
            )
        client = scope.get("client")
        note.owner = network_of(client[0]) if client else "unknown"
        if note.open_to_all:
            if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
                # It is not waited for: no key limits who sends one.
                raise Refusal(400, "send no body to this path", "body_not_expected")
            return
        if self._keys is not None:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            owner, wait = self._keys.admit(key.strip() if scheme.lower() == "bearer" else "", note.owner)
            if wait:
                message, wait_s = "too many wrong keys came from this address: wait", math.ceil(wait)
                raise Refusal(429, message, "too_many_wrong_keys", retry_after_s=wait_s)
            if owner is None:
                message = "the key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                raise Refusal(401, message, "invalid_api_key")
            note.owner = owner
        if self._open.room(note.owner) < 1:
            raise Refusal(
                503, f"{self._open.of(note.owner)} of your requests are open already, and {self._open.free} places are "
                "left for all: try again later",
                "too_many_requests", retry_after_s=self._service.retry_after_s(),
            )  # fmt: skip
        note.open = 1
        scope.get("sprinter.admit", lambda: None)()
        self._open.take(note.owner)
        note.asking = 1
        self._owners.asking.take(note.owner)
        self._owners.charge_texts(note.owner, 1)
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] == "POST" and kind != "application/json":  # a browser's form needs no permission
            raise Refusal(415, "the body is to be application/json", "unsupported_media_type")
        first = self._owners.turns.first
        if self._owners.asking.of(note.owner) > 1:
            first.end(note.owner)
        elif scope["method"] == "POST" and self._open.others(note.owner):
            note.first = first.begin(note.owner)
            note.after += [note.first] if note.first else []

    async def _read(self, headers: Headers, receive: Receive, note: RequestNote) -> bytes:
        """The whole body, whose bytes are counted until its request is answered.

        Raises:
            Refusal: it is too large, too slow, or has too many values. ClientLeft: the client has left.
        """
        parts: list[bytes] = []
        most, size = self._settings.max_body_bytes, 0
        declared = headers.get("content-length", "0")
        too_large = declared.isdecimal() and int(declared) > most
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                more = True
                while more and size <= _MOST_DISCARDED:
                    if size:
                        await self._line_up(f"{note.owner} bodies", {}, owner=note.owner)
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    too_large = too_large or size > most
                    if too_large:  # read on, so that the client can send it and see the answer
                        self._held.take(note.owner, -note.held)
                        note.held = 0
                        parts.clear()
                        continue
                    self._hold(note, len(part))
                    parts.append(part)
        except TimeoutError:
            if not too_large:
                raise Refusal(408, "the body took too long to arrive", "timeout", retry_after_s=1) from None
        if too_large:
            raise Refusal(413, f"the body is larger than {most} bytes: send less", "body_too_large")
        body = b"".join(parts)
        await self._line_up(note.owner, {}, owner=note.owner)
        if len(body) > _SMALL:
            await self._owners.turns.run(note.owner, lambda: check_shape(body))
        else:
            check_shape(body)
        self._hold(note, _VALUE_BYTES * min(body.count(b","), _MOST_VALUES))
        return body

    async def _line_up(
        self, name: str, scope: Mapping[str, Any], pace_s: float = 0.0, owner: str = ""
    ) -> None:
        """Wait for a turn: of many requests that are there at once the loop takes one an iteration, of each line in
        turn, and does all else between two.

        Args:
            name: of a line: an owner's, or of an address's requests without a key to a path (it has a space).
            pace_s: least time between two turns of the line where requests with keys are open.
            owner: who lets others' first texts go before.

        Raises:
            ClientLeft: the line is too long; its connections make room for others meanwhile, and are not counted.
        """
        if self._lines[name] >= self._settings.max_connections:
            scope.get("sprinter.abort", lambda: None)()
            await asyncio.sleep(0)  # until the connection knows
            raise ClientLeft
        self._lines[name] += 1
        try:
            turn = self._owners.turns.of(name)
            await turn.acquire()
            try:
                await self._owners.turns.after_first(owner)
                async with self._next:
                    await asyncio.sleep(0)
            finally:
                wait_s = pace_s if self._owners.turns.crowded("") else 0.0
                asyncio.get_running_loop().call_later(wait_s, turn.release) if wait_s else turn.release()
        finally:
            self._lines[name] -= 1
            if not self._lines[name]:
                del self._lines[name]

    def _hold(self, note: RequestNote, count: int) -> None:
        """Count bytes until the request is answered."""
        if self._held.room(note.owner) < count:
            message = "too much is being sent at the same time: try again later"
            raise Refusal(503, message, "no_memory", retry_after_s=1)
        self._held.take(note.owner, count)
        note.held += count


def check_shape(body: bytes) -> None:
    """Refuse a body with more objects, texts or values than any request needs; takes milliseconds per MiB.

    A parsed value takes up to a hundred times the memory of its two bytes of JSON, and each mistake is an error of its
    own.

    Raises:
        Refusal: it has too many.
    """
    if b"\0" in body:  # a parser would guess UTF-16, in which the marks below are others
        raise Refusal(400, "the body has a NUL byte: send JSON in UTF-8", "invalid_json")
    if body.count(b",") + body.count(b"[") + body.count(b"{") <= _MOST_OBJECTS:  # in texts or outside of them
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    fits = plain.count(b'"') <= 2 * _MOST_STRINGS
    if fits:
        outside = b"".join(plain.split(b'"')[::2])
        objects = outside.count(b"{") + outside.count(b"[")
        fits = objects <= _MOST_OBJECTS and outside.count(b",") <= _MOST_VALUES
    if not fits:
        raise Refusal(
            400,
            f"the body has too many values: send at most {_MOST_VALUES}, of them {_MOST_OBJECTS} objects and lists and "
            f"{_MOST_STRINGS} texts",
            "too_many_values",
        )


def network_of(address: str) -> str:
    """An address as an owner: of IPv6 its /64, of which whoever has one address has all."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address) or found.is_loopback:
        return address
    return str(found.ipv4_mapped or ipaddress.ip_network((int(found), 64), strict=False))


def _again(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body that was read, and then what follows."""
    given = False

    async def replay() -> Message:
        nonlocal given, body
        if given:
            return await receive()
        given, whole, body = True, body, b""  # it is not kept for the time of the answer
        return {"type": "http.request", "body": whole, "more_body": False}

    return replay
