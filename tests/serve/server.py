"""A real server on a loopback port, in a thread of the tests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

import sprinter
from sprinter.decode.draft import Origin, Token
from sprinter.serve.registry import Models
from sprinter.serve.run import make_server
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True)
class Running:
    """A server that runs."""

    service: Any
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, trust_env=False, verify=False, **options)

    def client(self) -> httpx2.AsyncClient:
        """As ``benchmarks.serve.servers.ServerProcess`` has it: without a limit on connections."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx2.AsyncClient(base_url=self.url, timeout=60, trust_env=False, limits=limits)

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60,
            http_client=httpx2.Client(trust_env=False, verify=False),
        )  # fmt: skip

    def post(self, path: str, body: Any, **options: Any) -> httpx2.Response:
        with self.http() as client:
            return client.post(path, json=body, **options)


def builtin_pair() -> sprinter.Pair:
    """The built-in pair with a chat template."""
    pair = sprinter.load_pair()
    assert pair.tokenizer is not None
    pair.tokenizer.chat_template = TEMPLATE
    return pair


def scope_of(path: str, host: bytes = b"localhost") -> dict[str, Any]:
    """An ASGI scope of a request with a JSON body, as the guard gets it."""
    headers = [(b"host", host), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("a", 1)}


def tokens(text: str, size: int) -> list[Token]:
    """A text as tokens of ``size`` characters."""
    return [Token(0, Origin.TARGET, 1, text=text[at : at + size]) for at in range(0, len(text), size)]


@contextmanager
def held(service: Service | None) -> Iterator[threading.Event]:
    """The steps of a model's engine wait for the event."""
    assert service is not None
    go, engine = threading.Event(), service.engine._engine
    real = engine.step

    def step() -> Any:
        assert go.wait(30)
        return real()

    engine.step = step  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        engine.step = real  # type: ignore[method-assign]


@contextmanager
def serving(pair: sprinter.Pair, *, wait: bool = True, **settings: Any) -> Iterator[Running]:
    """Serve a pair; at the end the server is asked to end, and must."""
    service = Service(
        ServeSettings(**{"port": 0, "max_len": 256, "model_name": "builtin", **settings}), lambda: pair
    )
    with running(service, wait=wait) as found:
        yield found


@contextmanager
def running(service: Service | Models, *, wait: bool = True) -> Iterator[Running]:
    server = make_server(service)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started and (not wait or service.state != "loading"))
        if wait and service.error is not None:  # the server has ended, or is about to
            raise service.error
        listening: socket.socket = server.servers[0].sockets[0]
        yield Running(service, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def until(condition: Any, seconds: float = 30) -> None:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
