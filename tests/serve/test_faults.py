"""Clients that leave, models that fail, queues that are full, connections that dawdle."""

from __future__ import annotations

import gc
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.engine.conftest import double_pair, fail_pass
from tests.engine.test_failures import hooked, nan_at
from tests.serve.server import Running, held, running, serving, until

import sprinter
from sprinter.errors import SprinterError, UserError
from sprinter.serve import run as runs
from sprinter.serve import service as services
from sprinter.serve.prometheus import ServeMetrics, ServeState
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

TEXT = "/v1/completions"
PROMPT = [3, 7, 1, 12, 5]


@pytest.fixture(scope="module")
def tiny() -> sprinter.Pair:
    return double_pair()


def body(new: int = 8, **fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": new, "seed": 1, **fields}


# --- clients ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_round(tiny: sprinter.Pair, stream: bool) -> None:
    with serving(tiny, rows=2, max_len=96) as server, held(server.service) as go:
        engine = server.service.engine
        sent = json.dumps(body(80, stream=stream, logit_bias={"0": -100})).encode()
        head = (
            f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(sent)}\r\n\r\n"
        )
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(head.encode() + sent)
        until(lambda: engine.unfinished == 1)
        client.close()
        time.sleep(0.1)  # the engine's step is held; the cancellation waits before the next one
        steps = [0]
        real = engine._engine.step
        engine._engine.step = lambda: steps.__setitem__(0, steps[0] + 1) or real()  # type: ignore[method-assign]
        go.set()
        until(lambda: engine.unfinished == 0)
        assert steps[0] <= 2
        assert server.post(TEXT, body()).status_code == 200


def test_a_client_that_sends_no_more_gets_its_answer(tiny: sprinter.Pair) -> None:
    with serving(tiny, rows=1, max_len=96) as server, held(server.service) as go:
        sent = json.dumps(body(1)).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(f"{head}content-length: {len(sent)}\r\n\r\n".encode() + sent)
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.1)
            go.set()
            assert b" 200 " in b"".join(iter(lambda: client.recv(4000), b""))


def test_a_slow_header_and_a_slow_body_are_cut_off(tiny: sprinter.Pair) -> None:
    with serving(tiny, rows=1, max_len=96, header_timeout_s=0.3, body_timeout_s=0.3) as server:
        for sent in (b"", b"POST /v1/completions HTTP/1.1\r\nhost: loc"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                client.sendall(sent)
                with suppress(ConnectionResetError):
                    assert client.recv(100) == b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            assert b" 408 " in client.recv(4000)
        with socket.create_connection(
            ("127.0.0.1", server.port), timeout=10
        ) as client:  # kept alive, then slow
            client.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            received = b""
            while b"}" not in received:
                received += client.recv(4000)
            assert b" 200 " in received
            client.sendall(b"GET /hea")
            with suppress(ConnectionResetError):
                assert client.recv(100) == b""
        large = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 4_000_000 + b"\r\n\r\n"
        with (
            socket.create_connection(("127.0.0.1", server.port), timeout=10) as client,
            suppress(ConnectionResetError, BrokenPipeError),
        ):
            client.sendall(large)
            assert b" 400 " in client.recv(4000)
        assert server.post(TEXT, body()).status_code == 200


def test_a_large_body_is_refused_before_it_is_kept(tiny: sprinter.Pair) -> None:
    with serving(tiny, rows=1, max_len=96) as server, server.http() as http:

        def parts() -> Iterator[bytes]:
            for _ in range(20):
                yield b" " * 2**20

        headers = {"content-type": "application/json"}
        for content in (b" " * 20 * 2**20, parts()):
            answer = http.post(TEXT, content=content, headers=headers)
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"


# --- queues and time --------------------------------------------------------------------------------------------------
def test_a_full_queue_is_429_and_time_limits_are_kept(tiny: sprinter.Pair) -> None:
    limits = {"max_waiting": 1, "queue_timeout_s": 0.4, "request_timeout_s": 1.0}
    with serving(tiny, rows=1, max_len=96, **limits) as server, held(server.service) as go:
        answers: dict[str, Any] = {}

        def ask(name: str, **fields: Any) -> None:
            answers[name] = server.post(TEXT, body(40, **fields))

        threads = [
            threading.Thread(target=ask, args=("first",)),
            threading.Thread(target=ask, args=("second",), kwargs={"stream": True}),
        ]
        for n, thread in enumerate(threads, 1):
            thread.start()
            until(lambda n=n: server.service.engine.unfinished == n)  # type: ignore[misc]
        full = server.post(TEXT, body())
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full"
        assert full.headers["retry-after"] == "1"
        server.service.engine._worker._text_s = 7.0  # the pace of earlier texts, one of which waits
        assert server.post(TEXT, body()).headers["retry-after"] == "14"
        several = server.post(TEXT, body(n=3))  # too many at any time
        assert several.status_code == 400 and "at most 2 at a time" in several.json()["error"]["message"]
        time.sleep(1.2)
        go.set()
        for thread in threads:
            thread.join(30)
        assert answers["second"].status_code == 503 and answers["second"].headers["retry-after"]
        assert answers["second"].json()["error"]["code"] == "queue_timeout"
        assert answers["first"].status_code == 504
        assert answers["first"].json()["error"]["code"] == "timeout"
        until(lambda: server.service.engine.unfinished == 0)

        def answered() -> bool:  # a stalled machine may let 0.4 s pass in the queue once more
            events = server.post(TEXT, body(stream=True)).text
            return events.endswith("data: [DONE]\n\n") and '"error"' not in events

        until(answered)


def test_no_memory_is_503(tiny: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny, rows=1, max_len=96) as server:
        with monkeypatch.context() as patch:
            patch.setattr(services, "free_bytes", lambda device: 10)
            answer = server.post(TEXT, body())
            assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_memory"
            assert answer.headers["retry-after"] == "5"
        fail_pass(monkeypatch, 3, MemoryError())
        answer = server.post(TEXT, body(40))
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_memory"
        assert server.post(TEXT, body()).status_code == 200


# --- models -----------------------------------------------------------------------------------------------------------
def test_a_request_that_poisons_logits_fails_alone_and_is_named(tiny: sprinter.Pair) -> None:
    expected = [
        tiny.generate([*PROMPT, i], method="speculative", max_new_tokens=30, seed=1) for i in range(3)
    ]
    with serving(tiny, rows=3, max_len=96) as server, held(server.service) as go:
        answers: list[Any] = [None] * 3

        def ask(i: int) -> None:
            own = {"tokens": True, "method": "speculative"}  # no text depends on other rows
            answers[i] = server.post(TEXT, {**body(30), "prompt": [*PROMPT, i], "sprinter": own})

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: server.service.engine.unfinished == 3)
        with hooked(tiny.models.target.model.lm_head, nan_at(4, 1)):  # type: ignore[union-attr]
            go.set()
            for thread in threads:
                thread.join(30)
        failed = [answer for answer in answers if answer.status_code == 500]
        assert len(failed) == 1 and "logits are NaN" in failed[0].json()["error"]["message"]
        for answer, out in zip(answers, expected, strict=True):
            if answer is not failed[0]:
                tokens = answer.json()["choices"][0]["sprinter"]["tokens"]
                assert [token["id"] for token in tokens] == [token.id for token in out.tokens]
        with hooked(tiny.models.target.model.lm_head, nan_at(3, 0)), server.http() as http:  # type: ignore[union-attr]
            events = http.post(TEXT, json=body(30, stream=True)).text.split("\n\n")
        assert "logits are NaN" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
        assert events[-2] == "data: [DONE]"
        with server.http() as http:
            assert http.get("/health").status_code == 200


def test_an_engine_that_dies_ends_the_server_with_a_reason(
    tiny: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    real = runs.make_server
    monkeypatch.setattr(
        runs, "make_server", lambda service: made.append((service, real(service))) or made[0][1]
    )
    ended: list[BaseException] = []

    def main() -> None:
        try:
            runs.serve(ServeSettings(port=0, rows=1, max_len=96), lambda: tiny)
        except SprinterError as error:
            ended.append(error)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    until(lambda: made and made[0][1].started and made[0][0].state == "ready")
    assert gc.get_freeze_count() > 100_000, (
        "collections are to go through what requests leave, and not all modules"
    )
    service, server = made[0][0].only, made[0][1]
    seen: list[Any] = []
    monkeypatch.setattr(service, "on_failure", lambda: None)  # time to look at it

    def broken() -> Any:
        raise RuntimeError("the device is gone")

    service.engine._engine.step = broken
    found = Running(service, server.servers[0].sockets[0].getsockname()[1])
    answer = found.post(TEXT, body())
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_failed"
    with found.http() as http:
        until(lambda: http.get("/health").status_code == 503)  # the answer may come before
        seen += [http.get("/health").status_code, http.get("/ready").status_code]
    assert seen == [503, 503] and found.post(TEXT, body()).status_code == 503
    server.should_exit = True
    thread.join(30)
    assert "the engine has stopped with an error (RuntimeError: the device is gone)" in str(ended[0])


def test_health_says_no_while_models_are_loaded(tiny: sprinter.Pair) -> None:
    go = threading.Event()

    def load() -> sprinter.Pair:
        assert go.wait(30)
        return tiny

    service = Service(ServeSettings(port=0, rows=1, max_len=96), load)
    with running(service, wait=False) as server, server.http() as http:
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 503
        answer = server.post(TEXT, body())
        assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
        assert answer.json()["error"]["code"] == "loading"
        assert b"sprinter_ready 0.0" in http.get("/metrics").content
        go.set()
        until(lambda: http.get("/ready").status_code == 200)
        assert http.get("/health").json() == {"status": "ready"}


@pytest.mark.parametrize(
    "settings", [{"method": "sprinter", "require_lossless": True}, {"method": "nothing"}]
)
def test_mistakes_end_the_server_before_it_serves(tiny: sprinter.Pair, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"lossy|nothing"):
        runs.serve(ServeSettings(port=0, rows=1, max_len=96, **settings), lambda: tiny)


def test_a_port_that_is_taken_is_named(tiny: sprinter.Pair) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}"):
            runs.serve(ServeSettings(port=port, rows=1, max_len=96), lambda: tiny)


# --- what is left behind ----------------------------------------------------------------------------------------------
def test_metrics_and_logs_tell_what_was_done_and_not_what_was_said(
    pair: sprinter.Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sprinter.serve")
    secret = "Xanadu's pleasure dome"
    with serving(pair, rows=2) as server:
        for method in ("speculative(gamma=4)", "sprinter(tau=0.6)", "stop=fixed(gamma=2)"):
            asked = {"prompt": secret, "max_tokens": 24, "seed": 1, "sprinter": {"method": method}}
            answer = server.post(TEXT, asked).json()
            server.post(TEXT, {**asked, "stream": True})
        server.post(TEXT, {"prompt": secret, "stop": [secret] * 65})
        server.post(TEXT, {"prompt": secret, secret: secret})
        with server.http() as http:
            text = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{engine="0",model_name="builtin"}'
    drafted = float(values[f"vllm:spec_decode_num_draft_tokens_total{label}"])
    kept = float(values[f"vllm:spec_decode_num_accepted_tokens_total{label}"])
    assert drafted >= kept > 0 and float(values[f"vllm:spec_decode_num_drafts_total{label}"]) > 0
    position = '{engine="0",model_name="builtin",position="0"}'
    assert float(values[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{position}"]) > 0
    assert (
        values['sprinter_texts_total{finish_reason="length",method="speculative",model_name="builtin"}']
        == "2.0"
    )
    assert (
        values['sprinter_texts_total{finish_reason="length",method="composed",model_name="builtin"}'] == "2.0"
    )
    assert float(values['sprinter_drift_total{method="sprinter",model_name="builtin"}']) > 0
    assert float(values['sprinter_drift_total{method="speculative",model_name="builtin"}']) == 0
    total, tokens, mean = (
        float(values[f'sprinter_{name}{{method="sprinter",model_name="builtin"}}'])
        for name in ("drift_total", "drift_tokens_total", "mean_drift")
    )
    assert mean == pytest.approx(total / tokens)
    assert values['sprinter_requests_total{path="/v1/completions",status="200"}'] == "6.0"
    assert values['sprinter_requests_total{path="/v1/completions",status="400"}'] == "2.0"
    assert values["sprinter_texts_running"] == "0.0" and values["sprinter_rows"] == "2.0"
    gateway = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    assert [values[f"vllm:{name}{label}"] for name in gateway] == ["0.0"] * 3
    lines = [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]
    told = [fields for event, fields in lines if event == "request" and fields["path"] == TEXT]
    assert told[0]["new_tokens"] == 24 and told[0]["status"] == 200 and told[0]["target_calls"] > 0
    assert told[0]["method"] == "speculative(gamma=4)" and answer["id"] == f"cmpl-{told[4]['id']}"
    everything = json.dumps([str(line) for line in lines])
    assert "Xanadu" not in everything and answer["choices"][0]["text"].strip()[:12] not in everything


def test_open_requests_end_before_the_server(tiny: sprinter.Pair) -> None:
    expected = tiny.generate(PROMPT, max_new_tokens=60, seed=1)
    with serving(tiny, rows=1, max_len=96) as server, held(server.service) as go:
        answers: list[Any] = []
        asked = body(60, sprinter={"tokens": True})
        thread = threading.Thread(target=lambda: answers.append(server.post(TEXT, asked)))
        thread.start()
        until(lambda: server.service.engine.unfinished == 1)
        threading.Timer(0.5, go.set).start()  # while the server waits for the request
    thread.join(30)
    tokens = answers[0].json()["choices"][0]["sprinter"]["tokens"]
    assert [token["id"] for token in tokens] == [token.id for token in expected.tokens]


def test_gauges_of_gateways(pair: sprinter.Pair) -> None:
    with sprinter.Engine(pair, rows=2, max_len=100) as engine:
        id = engine.add("The river", max_new_tokens=20, method="autoregressive")
        assert engine.held == 0
        while not engine.step():
            pass
        assert 0 < engine.held <= 30 / 200
        engine.cancel(id)
        assert engine.held == 0
    told = ServeMetrics(lambda: [ServeState("builtin", 3, 2, 4, True, 0.25)]).scrape().decode()
    values = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    gateway = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    found = [values[f'vllm:{name}{{engine="0",model_name="builtin"}}'] for name in gateway]
    assert found == ["3.0", "2.0", "0.25"]
