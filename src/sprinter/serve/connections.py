"""HTTP connections that are closed if a request's header does not arrive in time, and whose number is limited."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["timed_connections"]

_FAREWELL_S = 1.0


def timed_connections(header_timeout_s: float, most: int) -> type[H11Protocol]:
    """A class of connections for uvicorn, which waits without limit for the header of a request.

    A request finds ``scope["sprinter.abort"]``, which closes its connection without waiting for a client that does not
    read.

    Args:
        header_timeout_s: maximum time from the first byte of a header, or from the connection, to the header's end.
        most: number of connections; a new one takes the place of the one that has waited longest for a header.
    """
    idle: dict[H11Protocol, None] = {}  # those that wait for a header, in the order in which they began

    class TimedConnection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._watch()
            if len(self.connections) > most:
                next(iter(idle)).transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def handle_events(self) -> None:
            super().handle_events()
            if self.scope is not None:
                self.scope["sprinter.abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._stop()

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
                idle[self] = None

        def _stop(self) -> None:
            idle.pop(self, None)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self._stop()
            self.transport.abort()  # also if it is closing, and the client does not read the rest

    return TimedConnection
