"""Requests that are made to cost much: refused early, shortly, and at nobody else's cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conftest import double_pair
from tests.serve.server import Running, builtin_pair, held, scope_of, serving, until

import sprinter
from sprinter.decode.presets import METHODS
from sprinter.serve.api_errors import Refusal
from sprinter.serve.guard import RequestGuard, check_shape
from sprinter.serve.request_parsing import asked_of
from sprinter.serve.responses import json_parts
from sprinter.serve.schema import CompletionRequest, SprinterOptions
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings
from sprinter.serve.speculation import vllm_metrics
from sprinter.serve.turns import Turns

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [3, 7, 1, 12, 5]
KEYS = {"alice": "alice-secret-key-1", "bob": "bob-secret-key-22222"}


@pytest.fixture(scope="module")
def tiny() -> sprinter.Pair:
    return double_pair()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    file.chmod(0o600)
    return file


def as_(name: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {KEYS[name]}"}}


def read_all(client: socket.socket) -> bytes:
    """What a server sends before it closes."""
    return b"".join(iter(lambda: client.recv(4000), b""))


def repeated(item: bytes, times: int) -> bytes:
    return b",".join([item] * times)


def numbered(times: int) -> bytes:
    return b",".join(b'"%d":1' % i for i in range(times))


# --- bodies -----------------------------------------------------------------------------------------------------------
BODIES = {
    "objects": b'{"prompt": [' + repeated(b"{}", 1_200_000) + b"]}",
    "lists": b'{"prompt": [' + repeated(b"[]", 1_200_000) + b"]}",
    "some objects": b'{"prompt": [' + repeated(b"{}", 16_000) + b"]}",
    "nested": b'{"prompt": ' + b"[" * 2_000_000 + b"}",
    "nulls": b'{"prompt": [' + repeated(b"null", 800_000) + b"]}",
    "texts": b'{"prompt": [' + repeated(b'"a"', 1_000_000) + b"]}",
    "ids and a text": b'{"prompt": [' + repeated(b"1", 100_000) + b',"a"]}',
    "unknown fields": b'{"prompt": "x",' + numbered(30_000) + b"}",
    "more unknown fields": b'{"prompt": "x",' + numbered(300_000) + b"}",
    "biases": b'{"prompt": "x", "logit_bias": {' + numbered(30_000) + b"}}",
    "wrong biases": b'{"prompt": "x", "logit_bias": {' + numbered(1000).replace(b":1", b":{}") + b"}}",
    "stops": b'{"prompt": "x", "stop": [' + repeated(b"{}", 16_000) + b"]}",
    "stop ids": b'{"prompt": "x", "stop_token_ids": [' + repeated(b"-1", 100_000) + b"]}",
    "options": b'{"prompt": "x", "sprinter": {' + numbered(30_000) + b"}}",
    "messages": b'{"messages": [' + repeated(b"1", 100_000) + b"]}",
    "many messages": b'{"messages": [' + repeated(b'{"a":1}', 500_000) + b"]}",
}


@pytest.mark.parametrize("name", BODIES)
def test_large_bodies_are_refused_at_once_and_shortly(server: Running, name: str) -> None:
    body = BODIES[name]
    began = time.process_time()
    with server.http() as http:
        path = CHAT if "messages" in name else TEXT
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
    took = time.process_time() - began  # of both ends: the server is a thread of this process
    assert answer.status_code == 400 and len(answer.content) < 1000, answer.text
    assert took < 2


def test_the_shape_of_a_body_is_what_is_outside_of_its_texts() -> None:
    code = '{[,\\"' * 100_000
    check_shape(json.dumps({"prompt": code, "messages": [{"content": code}]}).encode())
    check_shape(json.dumps({"prompt": list(range(100_000))}).encode())
    for wrong in (
        [{}] * 20_000,
        [1] * 200_000,
        ["a"] * 40_000,
        [[]] * 20_000,
        dict.fromkeys(map(str, range(40_000))),
    ):
        with pytest.raises(Refusal, match="too many values"):
            check_shape(json.dumps({"prompt": wrong}).encode())
    with pytest.raises(Refusal, match="JSON in UTF-8"):
        check_shape('{"model": "\u0122", "messages": [{}]}'.encode("utf-16-le"))


@pytest.mark.parametrize("fields", [
    {"logit_bias": {"\ud800": 1}}, {"logit_bias": {"9" * 5000: 1}}, {"logit_bias": {"٣": 1}},
    {"logit_bias": {"9" * 19: 1}},
    {"stop": "\ud800"}, {"stop": ["\ud800"]}, {"sprinter": {"method": "\ud800"}}, {"\ud800": 1}, {"prompt": "\ud800"},
    {"prompt": ["a", "\ud800"]}, {"seed": 10**30}, {"max_tokens": 10**30}, {"prompt": [10**30]},
    {"stop_token_ids": [10**30]},
    {"sprinter": {"method": "speculative(gamma=1000000000)"}}, {"sprinter": {"method": "speculative(cap=1000000000)"}},
    {"sprinter": {"method": "speculative(gamma=" + "9" * 900 + ")"}}, {"sprinter": {"method": "\ud800(gamma=2)"}},
    {"sprinter": {"method": "speculative(gamma=65)"}}, {"sprinter": {"method": "certain(cap=65)"}},
    {"sprinter": {"method": "certain(tail=65)"}}, {"sprinter": {"method": "tree(nodes=65)"}},
    {"sprinter": {"method": "drafter=lookup(length=512)"}}, {"sprinter": {"method": "stop=svip(h=5.0),cap=none"}},
    {"sprinter": {"method": "certain(signal=1.0)"}}, {"sprinter": {"method": "certain(signal=none)"}},
], ids=lambda fields: ascii(fields)[:50])  # fmt: skip
def test_odd_values_are_mistakes_of_the_client(server: Running, fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "The", "max_tokens": 2, **fields}).encode()
    with server.http() as http:
        answer = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and len(answer.content) < 1000, answer.text


@pytest.mark.parametrize(
    "fields", [{"model": "\ud800"}, {"messages": [{"role": "\ud800", "content": "x"}]}], ids=str
)
def test_half_characters_elsewhere_are_no_error_of_the_server(
    server: Running, fields: dict[str, Any]
) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}).encode()
    with server.http() as http:
        answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 404)


def test_methods_by_their_defaults_have_short_drafts() -> None:
    for name in METHODS.names():
        asked_of(CompletionRequest(prompt="a", sprinter=SprinterOptions(method=name)), ServeSettings())
    asked_of(
        CompletionRequest(prompt="a", sprinter=SprinterOptions(method="block(gamma=40)")), ServeSettings()
    )


def test_a_prompt_too_long_by_characters_has_a_code(server: Running) -> None:
    for path, body in (
        (TEXT, {"prompt": "word " * 30_000}),
        (TEXT, {"prompt": "word " * 300}),
        (TEXT, {"prompt": [1] * 256}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 30_000}]}),
        ("/tokenize", {"prompt": "word " * 30_000}),
    ):
        answer = server.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("chunks", "size", "status"), [(120, 1, 200), (2000, 600, 200), (2000, 1, 400)])
def test_a_body_in_crumbs_is_refused(tiny: sprinter.Pair, chunks: int, size: int, status: int) -> None:
    body = b'{"prompt": [1], "max_tokens": 1}'
    with serving(tiny, rows=1, max_len=96) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            crumb = b"%x\r\n%b\r\n" % (size, b" " * size)
            client.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
            with contextlib.suppress(OSError):  # the server may close before all is sent
                client.sendall(crumb * chunks + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
            assert b"HTTP/1.1 %d" % status in client.recv(4000)
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200


# --- answers ----------------------------------------------------------------------------------------------------------
def test_answers_are_bounded_and_written_in_parts(server: Running) -> None:
    small = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 20, "seed": 1}
    assert server.post(TEXT, {**small, "n": 2}).status_code == 200
    for body in (
        {**small, "max_tokens": 250, "n": 64},
        {**small, "max_tokens": 250, "n": 64, "stream": True},
        {**small, "prompt": [PROMPT * 40] * 64, "echo": True},
        {"prompt": PROMPT, "max_tokens": 250, "n": 64, "sprinter": {"tokens": True}, "logprobs": 15},
    ):
        answer = server.post(TEXT, body)
        assert answer.status_code == 400 and "here are at most 262144" in answer.json()["error"]["message"]


@pytest.mark.parametrize("value", [
    {}, [], {"a": []}, {"a": {}}, [{}], [{"a": [{"b": [*range(100)]}]}] * 3, {"a": [{"b": "é\"\n"}] * 100, "c": None},
    {"a": [[1, 2]] * 40, "b": [{"c": {"d": {"e": [{"f": [*range(50)]}]}}}]}, [*range(33)], "x", 1.5, None,
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_parts_of_json_are_json(value: Any) -> None:
    assert "".join(json_parts(value)) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def test_a_large_answer_is_many_parts_which_are_made_as_they_are_written() -> None:
    made = 0

    def numbers() -> Iterator[int]:
        nonlocal made
        while made < 10_000:
            yield made
            made += 1

    answer = {"choices": ({"logprobs": {"tokens": numbers(), "top": [{"b": 1}] * 10_000}} for _ in range(3))}
    parts, most = "", 0
    for part in json_parts(answer):
        most = max(most, len(part))
        parts += part if len(parts) < 1000 else ""
        assert made < 1000 or len(parts) >= 1000
    assert most < 1000 and parts.startswith('{"choices":[{"logprobs":{"tokens":[0,1,2,')
    assert "".join(json_parts({"a": iter([]), "b": iter(range(40))})) == json.dumps(
        {"a": [], "b": [*range(40)]}, separators=(",", ":")
    )


def test_an_answer_that_is_not_read_is_cut_at_the_time_limit(tiny: sprinter.Pair) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def send(message: Any) -> None:
        await asyncio.sleep(1000)  # the client does not read

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    service = Service(ServeSettings(port=0, request_timeout_s=0.05), lambda: tiny)
    cut: list[bool] = []
    scope = {
        "type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"host", b"localhost")], "client": ("a", 1),
        "sprinter.abort": lambda: cut.append(True),
    }  # fmt: skip
    began = time.monotonic()
    asyncio.run(asyncio.wait_for(RequestGuard(app, service)(scope, receive, send), 30))
    assert cut == [True] and time.monotonic() - began < 10


@pytest.mark.parametrize("new", range(1, 9))
def test_the_mean_length_counts_nothing_behind_the_end(pair: sprinter.Pair, new: int) -> None:
    out = pair.generate(PROMPT, method="speculative(gamma=4)", max_new_tokens=new, seed=3)
    found = vllm_metrics([out])
    assert found["mean_acceptance_length"] == pytest.approx(len(out.tokens) / out.stats.target_calls)
    assert found["num_spec_tokens"] == min(4, new) == len(found["acceptance_histogram"]) - 1


# --- many requests ----------------------------------------------------------------------------------------------------
def test_no_key_fills_the_queue_for_all(tiny: sprinter.Pair, keys: Path) -> None:
    settings: dict[str, Any] = {"rows": 1, "max_len": 96, "max_waiting": 4, "api_keys": keys}
    with serving(tiny, **settings) as server, held(server.service) as go:
        body, engine, statuses = {"prompt": PROMPT, "max_tokens": 4}, server.service.engine, list[int]()

        def ask(name: str) -> None:
            statuses.append(server.post(TEXT, body, **as_(name)).status_code)

        threads = []
        for n, name in enumerate(("alice", "alice", "alice", "bob", "bob"), 1):
            threads.append(threading.Thread(target=ask, args=(name,)))
            threads[-1].start()
            until(lambda n=n: engine.unfinished == n)  # type: ignore[misc]
            if n == 3:
                full = server.post(TEXT, body, **as_("alice"))
                assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
                assert "of your requests wait" in full.json()["error"]["message"]
                assert server.post(TEXT, {**body, "n": 4}, **as_("bob")).status_code == 400
        go.set()
        for thread in threads:
            thread.join(30)
        assert statuses == [200] * 5


def test_a_row_is_kept_for_another_key_if_there_is_one(tiny: sprinter.Pair, keys: Path) -> None:
    for most in (1, 2):
        with serving(tiny, rows=2, max_len=96, api_keys=keys) as server:
            assert server.service.engine._worker._left_free == 2 - most
        keys.write_text(f"alice {KEYS['alice']}\nalice another-secret-key\n")


def test_no_key_holds_all_open_requests_or_the_memory_of_bodies(
    tiny: sprinter.Pair, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.serve.guard._MOST_HELD", 100_000)
    limits = {"max_connections": 8, "max_body_bytes": 25_000}
    with serving(tiny, rows=1, max_len=96, api_keys=keys, **limits) as server, held(server.service) as go:
        head = (
            f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {KEYS['alice']}\r\ncontent-length: 24000\r\n\r\n"
        ).encode()
        whole = json.dumps({"prompt": PROMPT, "max_tokens": 2}).encode().ljust(24_000)
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(5)]
        for n, client in enumerate(clients[:2], 1):  # their bodies have been read, and they are not answered
            client.sendall(head + whole)
            until(lambda n=n: server.service.engine.unfinished == n)  # type: ignore[misc]
        clients[2].sendall(head + whole)
        assert b"too much is being sent" in read_all(clients[2])
        many = server.post(TEXT, {"prompt": [1] * 4000}, **as_("bob"))  # its values take more than the body
        assert many.status_code == 503 and "too much is being sent" in many.text
        for client in clients[2:4]:
            client.close()
        clients[2:4] = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
        for client in clients[2:4]:
            client.sendall(head)  # and no body
        time.sleep(0.2)
        clients[4].sendall(head)
        assert b"4 of your requests are open already, and 4 places are left" in read_all(clients[4])
        go.set()
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}, **as_("bob")).status_code == 200
        for client in clients[:2]:
            assert b" 200 " in client.recv(4000)
        for client in clients:
            client.close()
        until(
            lambda: server.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}, **as_("alice")).status_code == 200
        )


def test_bodies_that_are_there_at_once_are_parsed_one_by_one(tiny: sprinter.Pair) -> None:
    parsed = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal parsed
        parsed += 1
        await asyncio.sleep(1000)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def main() -> None:
        guard = RequestGuard(app, Service(ServeSettings(port=0), lambda: tiny))
        asked = [asyncio.create_task(guard(scope_of(TEXT), receive, receive)) for _ in range(20)]
        while parsed < 20:
            before = parsed
            await asyncio.sleep(0)
            assert parsed <= before + 1
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_owners_take_turns_beside_the_event_loop() -> None:
    async def main() -> None:
        turns, go, done = Turns(), threading.Event(), list[str]()
        running = [asyncio.create_task(turns.run("alice", go.wait))]
        running += [asyncio.create_task(turns.run("alice", lambda: done.append("alice"))) for _ in range(9)]
        await asyncio.sleep(0)
        await asyncio.wait_for(turns.run("bob", lambda: done.append("bob")), 10)
        assert done == ["bob"], "one piece of an owner at a time"
        running[0].cancel()  # it ends all the same before the next one begins
        running[1].cancel()
        await asyncio.sleep(0.01)
        assert done == ["bob"]
        go.set()
        await asyncio.gather(*running[2:])
        assert done == ["bob", *["alice"] * 8]
        with pytest.raises(ZeroDivisionError):
            await turns.run("alice", lambda: 1 // 0)
        assert await turns.run("alice", lambda: 5) == 5

    asyncio.run(main())


def test_tokens_that_are_only_counted_are_charged_too(tiny: sprinter.Pair, keys: Path) -> None:
    with serving(builtin_pair(), rows=1, max_len=96, api_keys=keys, token_limit=20) as server:
        statuses = [
            server.post("/tokenize", {"prompt": "a b c d " * 4}, **as_("alice")).status_code for _ in range(3)
        ]
        assert statuses[0] == 200 and statuses[-1] == 429
        assert server.post("/detokenize", {"tokens": [1] * 20}, **as_("bob")).status_code == 200
        assert server.post("/detokenize", {"tokens": [1] * 20}, **as_("bob")).status_code == 429


def test_texts_and_tokens_are_counted_by_key(tiny: sprinter.Pair, keys: Path) -> None:
    limits = {"rate_limit": 6, "token_limit": 100}
    with serving(tiny, rows=1, max_len=96, api_keys=keys, **limits) as server:
        body = {"prompt": PROMPT, "max_tokens": 4}
        assert server.post(TEXT, {**body, "n": 5}, **as_("alice")).status_code == 200
        for fields in ({"n": 2}, {"n": 2}):
            answer = server.post(TEXT, {**body, **fields}, **as_("alice"))
            assert answer.status_code == 429 and "6 texts" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        assert (
            server.post(TEXT, {**body, "max_tokens": 80, "stop_token_ids": [0]}, **as_("bob")).status_code
            == 200
        )
        tokens = server.service.owners._tokens
        assert tokens is not None
        spent = 100 - tokens._left["bob"][0]
        assert 6 <= spent <= 85
        tokens._left["bob"] = (5.0, time.monotonic())
        answer = server.post(TEXT, body, **as_("bob"))
        assert answer.status_code == 429 and "100 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("shared", [False, True])
def test_prefixes_are_not_shared_between_keys(pair: sprinter.Pair, keys: Path, shared: bool) -> None:
    with serving(pair, rows=2, max_len=512, api_keys=keys, share_prefixes=shared) as server:
        body = {"prompt": [5, 9, 2, 11] * 70, "max_tokens": 1, "seed": 1}

        def cached(name: str) -> int:
            usage = server.post(TEXT, body, **as_(name)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("alice") == 0 and cached("alice") >= 128
        assert (cached("bob") >= 128) == shared and cached("bob") >= 128
        several = server.post(TEXT, {**body, "n": 2}, **as_("alice")).json()
        assert several["choices"][1]["sprinter"]["cached_tokens"] >= 128


def test_health_is_answered_when_all_else_is_full(tiny: sprinter.Pair) -> None:
    with (
        serving(tiny, rows=1, max_len=96, max_connections=2) as server,
        held(server.service) as go,
        server.http() as http,
    ):
        body = {"prompt": PROMPT, "max_tokens": 4}
        threads = [threading.Thread(target=server.post, args=(TEXT, body)) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: server.service.engine.unfinished == 2)
        full = server.post(TEXT, body)
        assert full.status_code == 503 and full.json()["error"]["code"] == "too_many_requests"
        assert full.headers["retry-after"] and http.get("/health").status_code == 200
        go.set()
        for thread in threads:
            thread.join(30)
        assert server.post(TEXT, body).status_code == 200
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        with server.http() as fresh:  # a connection that is idle may have been closed
            statuses = fresh.get("/health").status_code, fresh.post(TEXT, json=body).status_code
        for one in idle:
            one.close()
        assert statuses == (200, 200)


@pytest.mark.parametrize("more", ["content-length: 1000", "transfer-encoding: chunked"])
def test_paths_without_keys_wait_for_no_body(tiny: sprinter.Pair, more: str) -> None:
    with serving(tiny, rows=1, max_len=96, max_connections=2) as server:
        head = f"POST /health HTTP/1.1\r\nhost: localhost\r\n{more}\r\n\r\n".encode()
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(4)]
        for client in clients:
            client.sendall(head)
            assert b" 400 " in client.recv(4000)
        assert server.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200
        for client in clients:
            client.close()


def test_bodies_that_come_at_the_same_time_are_limited_together(
    tiny: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sprinter.serve.guard._MOST_HELD", 100_000)
    with serving(tiny, rows=1, max_len=96, max_body_bytes=25_000) as server:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 24000\r\n\r\n"
        )
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(5)]
        for client in clients[:4]:
            client.sendall(head + b" " * 23_900)
        time.sleep(0.3)
        clients[4].sendall(head + b" " * 23_900)
        assert b" 503 " in clients[4].recv(4000)
        clients[0].sendall(b" " * 100)
        assert b" 400 " in clients[0].recv(4000)
        for client in clients:
            client.close()
        until(lambda: server.post(TEXT, {"prompt": PROMPT, "max_tokens": 1}).status_code == 200)


def test_head_is_get_without_a_body(server: Running) -> None:
    with server.http() as http:
        for path in ("/health", "/v1/models", "/metrics", "/", "/openapi.json"):
            answer = http.head(path)
            assert (
                answer.status_code == 200 and not answer.content and int(answer.headers["content-length"]) > 0
            )
        assert http.head("/nothing").status_code == 404 and http.head(TEXT).status_code == 405
        assert http.get("/health").json() == {"status": "ready"}
