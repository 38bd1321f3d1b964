"""HTTPS: handshakes are counted and have an end, like headers."""

from __future__ import annotations

import asyncio
import gc
import ssl
from asyncio.sslproto import SSLProtocol
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.engine.conftest import double_pair
from uvicorn.server import ServerState

from sprinter.errors import UserError
from sprinter.serve.connections import timed_connections
from sprinter.serve.run import make_server
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

# Of this test alone: a key without a secret, and a certificate of localhost.
PEM = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQglqHgk1CyPv2NDFnK
XUE1tolFG+MKCaiMFxSeJfCOpFihRANCAAS/S8ehhML07z2B//NgQFNXYY86e2kh
vUEIZRBdi67xh5JSXqe0ScWPJ8NPqk1p39dmRhKqkw3vxmQHWvVo+4ft
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBfjCCASWgAwIBAgIUYxdAwSSSMtRp9q1ZQ2Yy02YU3LIwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyODA4NDgzMFoYDzIxMjYxMTA0
MDg0ODMwWjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAAS/S8ehhML07z2B//NgQFNXYY86e2khvUEIZRBdi67xh5JSXqe0ScWP
J8NPqk1p39dmRhKqkw3vxmQHWvVo+4fto1MwUTAdBgNVHQ4EFgQU2Gi56slTG0Ge
zYQHB9LTkYCAmr4wHwYDVR0jBBgwFoAU2Gi56slTG0GezYQHB9LTkYCAmr4wDwYD
VR0TAQH/BAUwAwEB/zAKBggqhkjOPQQDAgNHADBEAiBwLK4YisCPTOlcq/ONsytJ
Dh0UqpwVtN5d8XZqe+/khgIgAVUPOZNGhezl+aMKjbkNTpbeRjh06buPuGJsfICx
2nQ=
-----END CERTIFICATE-----
"""
ASK = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["scheme"] == "https"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
    await send({"type": "http.response.body", "body": b"x"})


async def listening(folder: Path, most: int, timeout: float) -> asyncio.Server:
    (folder / "both.pem").write_text(PEM)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "both.pem")
    made: Any = timed_connections(timeout, most, context)
    config = uvicorn.Config(app, http=made, ws="none", log_config=None, lifespan="off")
    config.load()
    state = ServerState()
    return await asyncio.get_running_loop().create_server(lambda: made(config, state, {}), "127.0.0.1", 0)


async def answered(port: int) -> bytes:
    """The answer to a request that comes with the end of the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=PEM)
    to_us, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    talk = context.wrap_bio(to_us, to_server, server_hostname="localhost")
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while True:
        try:
            talk.do_handshake()
            break
        except ssl.SSLWantReadError:
            writer.write(to_server.read())
            to_us.write(await reader.read(9999))
    talk.write(ASK)
    writer.write(to_server.read())
    answer = b""
    while not answer.endswith(b"x"):
        to_us.write(await reader.read(9999))
        with suppress(ssl.SSLWantReadError):
            while piece := talk.read(9999):
                answer += piece
    writer.close()
    return answer


def test_handshakes_are_counted_and_have_an_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with await listening(tmp_path, most=3, timeout=0.6) as server:
            port = server.sockets[0].getsockname()[1]
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert (await answered(port)).startswith(b"HTTP/1.1 200")
            loop, all_objects = asyncio.get_running_loop(), gc.get_objects()
            shaking = (one for one in all_objects if type(one) is SSLProtocol and one._loop is loop)
            assert {len(one._ssl_buffer) for one in shaking} == {2**15}  # type: ignore[attr-defined]
            del all_objects, shaking
            first, second, _ = (reader for reader, _ in silent)
            assert await first.read() == b"", "it made room"
            assert not second.at_eof()
            silent[1][1].write(b"GET / HTTP/1.1\r\n\r\n")  # no handshake
            await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in silent)), 5)
            assert (await answered(port)).startswith(b"HTTP/1.1 200")
            for _, writer in silent:
                writer.close()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_certificate_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    for name in ("missing.pem", "bad.pem"):
        settings = ServeSettings(tls_cert=tmp_path / name, tls_key=tmp_path / name)
        with pytest.raises(
            UserError, match=r"\.pem' cannot be used \(.*: give PEM files that belong together"
        ):
            make_server(Service(settings, double_pair))
