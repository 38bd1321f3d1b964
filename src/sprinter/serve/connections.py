"""Connections whose number is limited, and which are closed if a handshake or a header is late, or a body is crumbs."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections import deque
from collections.abc import Callable, Sized
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["timed_connections"]

_FAREWELL_S = 1.0
_HEADER = 2**14  # maximum size of a header, to within a piece
_PIECE = 2**13  # bytes that are parsed before it is looked whether the connection is still open
_READ = 2**16  # bytes that a connection reads an iteration of the event loop; asyncio's default is 2**18
_AT_ONCE = 8  # crumbs that are parsed in one iteration
_PROBE_S, _GO_ON = 0.02, b"HTTP/1.1 100 Continue\r\n\r\n"  # every client reads over it
_BAD = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: 30\r\n\r\nInvalid HTTP request received."
)
_TLS_READ = 2**15  # bytes that each handshake allocates; asyncio's default is 2**18
_FEW, _CRUMB = 128, 512  # chunks of a body of any size, and the least mean size of more, in bytes


class _Parser(h11.Connection):
    """A parser that refuses a body in more and smaller chunks than any client needs: each costs as much as a request.

    The parser works off all that was read in one go, in the event loop, but for crumbs: after ``allowed`` of them it
    has no event.
    """

    _chunks = _bytes = 0
    allowed = _AT_ONCE

    def next_event(self) -> Any:
        if self.allowed <= 0:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + event.chunk_start, self._bytes + len(event.data)
            self.allowed -= event.chunk_start and len(event.data) < _CRUMB
            if self._chunks > max(_FEW, self._bytes / _CRUMB):
                raise h11.RemoteProtocolError("the body comes in too small chunks")
        return event


class _Flow(FlowControl):
    """Reads nothing on while the connection waits for its turn."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


def timed_connections(
    header_timeout_s: float, most: int, tls: ssl.SSLContext | None = None
) -> Callable[..., asyncio.Protocol]:
    """A class of connections for uvicorn, which waits without limit for the header of a request.

    A request finds ``scope["sprinter.abort"]``, which closes its connection without waiting for a client that does not
    read, and ``scope["sprinter.admit"]``, after which no new connection takes its place.

    Args:
        header_timeout_s: maximum time from the first byte of a header, or from the connection, to the header's end.
        most: number of connections; a new one takes the place of the one that has waited longest for a header, or for
            its request to be admitted. One that shakes hands waits so too.
        tls: of the server; None: plain HTTP.
    """
    idle: dict[Any, None] = {}  # those that wait so, in the order in which they began
    shaking: set[_Handshake] = set()
    crumbs: deque[TimedConnection] = (
        deque()
    )  # those with more of them, of which each iteration parses for one

    def go_on() -> None:
        connection = crumbs.popleft()
        if crumbs:
            asyncio.get_running_loop().call_soon(go_on)
        connection.go_on()

    def make_room(connections: Sized) -> None:
        if len(connections) + len(shaking) > most:
            oldest = next(iter(idle))
            del idle[oldest]  # its connection is lost later
            oldest.transport.abort()

    class TimedConnection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        conn: _Parser
        flow: _Flow
        _rest = b""  # not parsed yet
        _ended = False  # the client sends no more

        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.conn = _Parser(h11.SERVER, _HEADER)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            transport.max_size = _READ
            self.flow = _Flow(transport)
            self._watch()
            make_room(self.connections)

        def data_received(self, data: bytes) -> None:
            data, self._rest = self._rest + data, b""
            for at in range(0, len(data), _PIECE):
                if self.transport.is_closing():
                    return
                if self.flow.held:
                    self._rest = data[at:]
                    break
                super().data_received(data[at : at + _PIECE])
            self._watch()

        def go_on(self) -> None:
            """Parse more crumbs."""
            self.conn.allowed, self.flow.held = _AT_ONCE, False
            if not self.transport.is_closing():
                self.flow.resume_reading()
                self.handle_events()
                self.data_received(b"")

        def eof_received(self) -> bool:  # type: ignore[override]
            """A client that has sent all may still read the answer; with TLS and HTTP/1.0 it counts as gone, and where
            the answer has begun, as nothing could be written to try it."""
            begun = self.conn.our_state is not h11.SEND_RESPONSE
            waits = self.cycle is not None and not begun and not self.cycle.more_body
            if self._ended:
                return True
            self._ended = waits and self.scheme == "http" and self.conn.their_http_version != b"1.0"
            if self._ended:
                self._probe(_PROBE_S)
            return self._ended

        def _probe(self, pause_s: float) -> None:
            """Only writing twice shows whether it reads, or has left: then its text need not be written."""
            if self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing():
                self.transport.write(_GO_ON)
                asyncio.get_running_loop().call_later(pause_s, self._probe, 2 * pause_s)

        def _unsupported_upgrade_warning(self) -> None:
            """Nothing is wrong: a server may answer in plain HTTP."""

        def send_400_response(self, msg: str) -> None:
            if self.conn.our_state is not h11.SEND_RESPONSE and self.conn.our_state is not h11.IDLE:
                self.transport.abort()  # the answer has begun
                return
            if self.cycle is not None:
                self.cycle.disconnected = True
            self.transport.write(_BAD)  # as it is: a stranger sends many of them
            self.transport.close()

        def handle_events(self) -> None:
            if self.flow.write_paused and (self.cycle is None or self.cycle.response_complete):
                if self.conn.trailing_data[0]:
                    self.transport.abort()  # it asks on and does not read: it would wait where no place is counted
                return  # what is left of an answer is on its way
            super().handle_events()
            if self.conn.allowed <= 0 and not self.flow.held and not self.transport.is_closing():
                self.flow.pause_reading()
                self.flow.held = True
                crumbs.append(self)
                if len(crumbs) == 1:
                    asyncio.get_running_loop().call_soon(go_on)
            if self.scope is not None:
                self.scope["sprinter.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]
                self.scope["sprinter.admit"] = self._admit  # type: ignore[typeddict-unknown-key]

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()
            if self._ended and self.cycle.response_complete:
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()
            self._admit()

        def shutdown(self) -> None:
            super().shutdown()
            if self.cycle is None or self.cycle.response_complete:  # TLS waits for the client's answer, long
                asyncio.get_running_loop().call_later(_FAREWELL_S, self.transport.abort)

        def _watch(self) -> None:
            """Begin to wait for a header, or end the wait."""
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(header_timeout_s, self._late)
                idle.pop(self, None)
                idle[self] = None

        def _admit(self) -> None:
            idle.pop(self, None)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._stop()
            self.transport.abort()  # also if it is closing, and the client does not read the rest

    class _Handshake(asyncio.Protocol):
        """A connection before and in its TLS handshake, which asyncio would not count, and wait for 60 s."""

        def __init__(self, connection: TimedConnection, context: ssl.SSLContext) -> None:
            self._connection, self._context = connection, context
            self._early: list[bytes] = []  # what came with the end of the handshake

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            transport.pause_reading()  # what comes is for TLS
            shaking.add(self)
            idle[self] = None
            make_room(self._connection.connections)
            self._task = asyncio.get_running_loop().create_task(self._shake())

        def data_received(self, data: bytes) -> None:
            self._early.append(data)

        async def _shake(self) -> None:
            try:
                secured = not self.transport.is_closing() and await asyncio.get_running_loop().start_tls(
                    self.transport,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=header_timeout_s,
                )
            except OSError:  # ssl.SSLError is one: it is no handshake, it was late, or it has made room
                secured = None
            finally:
                shaking.discard(self)
                idle.pop(self, None)
            if not secured or secured.is_closing():
                self.transport.abort()
                return
            secured.set_protocol(self._connection)
            self._connection.connection_made(secured)
            for data in self._early:
                self._connection.data_received(data)

    if tls is not None:
        SSLProtocol.max_size = _TLS_READ

    def made(*args: Any, **keywords: Any) -> asyncio.Protocol:
        connection = TimedConnection(*args, **keywords)
        return connection if tls is None else _Handshake(connection, tls)

    return made
