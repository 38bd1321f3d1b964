"""Connections and requests of strangers: many at once hold up nobody, and make room."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import uvicorn
from tests.engine.conftest import double_pair
from tests.serve.server import scope_of
from uvicorn.server import ServerState

from sprinter.serve.connections import timed_connections
from sprinter.serve.guard import RequestGuard
from sprinter.serve.run import make_server
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

ASK = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


def connector(app: Any, most: int) -> Callable[[], tuple[Any, Mock]]:
    """Makes connections to an application, without sockets."""
    config = uvicorn.Config(
        app, http=timed_connections(10.0, most), ws="none", log_config=None, lifespan="off"
    )
    config.load()
    state = ServerState()

    def connect() -> tuple[Any, Mock]:
        transport = Mock(asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        connection: Any = timed(config, state, {})
        connection.connection_made(transport)
        return connection, transport

    timed: Any = config.http_protocol_class
    return connect


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 30))


def test_requests_that_are_not_admitted_make_room_for_new_connections() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/admitted":
            scope["sprinter.admit"]()
        await asyncio.sleep(1000)

    async def main() -> None:
        connect = connector(app, most=3)
        found = [connect() for _ in range(3)]
        for (connection, _), path in zip(found, (b"/admitted", b"/health", b"/health"), strict=True):
            connection.data_received(ASK.replace(b"/health", path))
        await asyncio.sleep(0)
        found += [connect() for _ in range(2)]  # before those that are aborted are lost
        assert [transport.abort.called for _, transport in found] == [False, True, True, False, False]

    run(main())


def test_a_client_that_asks_on_and_does_not_read_is_cut() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def main() -> None:
        connection, transport = connector(app, most=3)()
        for cut in (False, True):
            if cut:
                connection.pause_writing()
            connection.data_received(ASK)
            await asyncio.sleep(0)
            assert transport.abort.called == cut and transport.write.called

    run(main())


def test_crumbs_of_many_bodies_are_parsed_in_turns() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1000)

    async def main() -> None:
        connect = connector(app, most=5)
        found = [connect() for _ in range(3)]
        head = ASK.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
        for connection, transport in found:
            connection.data_received(head + b"1\r\nx\r\n" * 100 + b"0\r\n\r\n")
            assert transport.pause_reading.called and not transport.resume_reading.called
            connection.flow.resume_reading()  # as the application does
            assert not transport.resume_reading.called, "it waits for its turn"

        def parsed() -> int:
            return sum(len(connection.cycle.body) for connection, _ in found)

        while (before := parsed()) < 300:
            await asyncio.sleep(0)
            assert before < parsed() <= before + 8
        await asyncio.sleep(0)
        for connection, transport in found:
            assert not connection.cycle.more_body and transport.resume_reading.called

    run(main())


def test_what_is_no_http_is_refused_in_one_piece() -> None:
    async def main() -> None:
        connection, transport = connector(Mock(), most=3)()
        connection.data_received(b"no HTTP\r\n\r\n")
        ((answer,),) = (call.args for call in transport.write.call_args_list)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"content-length: %d" % len(body) in head
        assert transport.close.called

    run(main())


def test_a_client_that_sends_no_more_is_answered_and_one_that_has_left_is_noticed() -> None:
    """An upgrade is not done, which is nothing to warn of."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def main() -> None:
        connection, transport = connector(app, most=3)()
        assert not connection.eof_received(), "nothing is asked"
        upgrade = b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
        connection.logger = Mock(level=30)
        connection.data_received(ASK.replace(b"\r\n\r\n", upgrade))
        assert connection.eof_received() and not connection.logger.warning.called
        await asyncio.sleep(0.1)
        probes = [call.args[0] for call in transport.write.call_args_list]
        assert 2 <= len(probes) < 6 and {*probes} == {b"HTTP/1.1 100 Continue\r\n\r\n"}
        go.set()
        await asyncio.sleep(0.01)
        assert transport.write.call_args_list[len(probes)].args[0].startswith(b"HTTP/1.1 200")
        assert transport.close.called

    run(main())


@pytest.mark.parametrize("host", [b"localhost", b"elsewhere"], ids=["keyless", "refused"])
def test_many_requests_without_a_key_are_answered_one_an_iteration(host: bytes) -> None:
    answered, cut = 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        nonlocal answered
        answered += message["type"] == "http.response.start"

    def abort() -> None:
        nonlocal cut
        cut += 1

    async def main() -> None:
        guard = RequestGuard(app, Service(ServeSettings(port=0, max_connections=20), double_pair))
        scope = {**scope_of("/health", host), "method": "GET", "sprinter.abort": abort}
        asked = [asyncio.create_task(guard({**scope}, Mock(), send)) for _ in range(25)]
        while answered < 20:
            before = answered
            await asyncio.sleep(0)
            assert answered <= before + 1
        await asyncio.gather(*asked)
        assert (answered, cut) == (20, 5), "a line has an end"

    run(main())


@pytest.mark.parametrize(("crowded", "pauses"), [(True, [0.005] * 20), (False, [])])
def test_requests_without_a_key_leave_time_to_those_with_one(crowded: bool, pauses: list[float]) -> None:
    """Of an address and path, between two of them: a stranger may ask for /health a thousand times a second."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def main() -> None:
        service, found, loop = (
            Service(ServeSettings(port=0), double_pair),
            list[float](),
            asyncio.get_running_loop(),
        )
        service.owners.open.take("alice", int(crowded))

        def call_later(seconds: float, call: Any, *args: Any) -> Any:
            found.append(seconds)
            return loop.call_soon(call, *args)

        guard, scope = RequestGuard(app, service), {**scope_of("/health"), "method": "GET"}
        loop.call_later, real = call_later, loop.call_later  # type: ignore[method-assign]
        await asyncio.gather(*(guard({**scope}, Mock(), AsyncMock()) for _ in range(20)))
        loop.call_later = real  # type: ignore[method-assign]
        assert found == pauses

    run(main())


def test_large_bodies_that_come_at_once_are_read_in_turns() -> None:
    parts = 0

    async def receive() -> Any:
        nonlocal parts
        parts += 1
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b" " * 100, "more_body": True}

    async def main() -> None:
        guard = RequestGuard(Mock(), Service(ServeSettings(port=0, max_body_bytes=50), double_pair))
        asked = [asyncio.create_task(guard(scope_of("/tokenize"), receive, Mock())) for _ in range(9)]
        await asyncio.sleep(0)
        while parts < 30:
            before = parts
            await asyncio.sleep(0)
            assert parts <= before + 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    run(main())


def test_few_connections_are_accepted_an_iteration() -> None:
    async def main() -> None:
        server: Any = make_server(Service(ServeSettings(port=0), double_pair))
        server.config.load()
        server.lifespan = Mock(should_exit=False, startup=lambda: asyncio.sleep(0), state={})
        await server.startup()
        address = server.servers[0].sockets[0].getsockname()
        clients = [
            socket.create_connection(address, timeout=5) for _ in range(50)
        ]  # the system lets them wait
        found, now = server.server_state.connections, 0
        while now < 50:
            before = now
            await asyncio.sleep(0)
            now = len(found)
            assert now <= before + 16
        for client in clients:
            client.close()
        server.servers[0].close()

    run(main())
