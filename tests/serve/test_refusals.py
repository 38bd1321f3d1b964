"""What is not served: in OpenAI's shape, with the right status, and without repeating the body."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.serve.server import Running, serving

import sprinter
from sprinter.engine.options import OPTIONS
from sprinter.errors import UserError
from sprinter.parameters import limits_of
from sprinter.serve.api_errors import of_error, of_fields
from sprinter.serve.guard import network_of
from sprinter.serve.keys import ApiKeys, RateLimit
from sprinter.serve.schema import CompletionRequest, fields_of
from sprinter.serve.settings import ServeSettings

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID: list[Any] = [{"role": "user", "content": "secret words"}]


def refusal(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert answer.headers["x-request-id"]
    return error


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (TEXT, {"best_of": 2}),
        (TEXT, {"suffix": "x"}),
        (TEXT, {"mirostat": 1}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        (CHAT, {"functions": []}),
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"echo": True}),
        (CHAT, {"sprinter": {"drift": 0.1}}),
        (CHAT, {"stream": True, "stream_options": {"include_usage": True, "other": 1}}),
    ],
    ids=str,
)
def test_other_fields_are_refused_and_never_ignored(
    server: Running, path: str, field: dict[str, Any]
) -> None:
    body = {"prompt": "secret words"} if path == TEXT else {"messages": SAID}
    answer = server.post(path, {**body, "max_tokens": 1, **field})
    error = refusal(answer)
    assert answer.status_code == 400 and error["code"] == "unsupported_field"
    assert error["param"].split(".")[0] in field and "leave it out" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "meant"),
    [
        (TEXT, {"temprature": 1}, "temperature"),
        (TEXT, {"max_completion_tokens": 1}, None),
        (CHAT, {"max_completion_token": 1}, "max_completion_tokens"),
        (CHAT, {"method": "lookup"}, "sprinter.method"),
        (CHAT, {"sprinter": {"budgett": 0.1}}, "sprinter.budget"),
        (CHAT, {"sprinter": {"seed": 1}}, "seed"),
        (CHAT, {"web_search_options": {}}, None),
    ],
    ids=str,
)
def test_the_field_that_was_meant_is_named(
    server: Running, path: str, field: dict[str, Any], meant: str | None
) -> None:
    body = {"prompt": "secret words"} if path == TEXT else {"messages": SAID}
    message = refusal(server.post(path, {**body, **field}))["message"]
    assert message.endswith("leave it out") and (meant is None) == ("did you mean" not in message)
    assert meant is None or f"did you mean '{meant}'?" in message


@pytest.mark.parametrize("place", [
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "sprinter.budget",
])  # fmt: skip
def test_bounds_are_those_of_the_options(place: str) -> None:
    option, field = OPTIONS[place.rpartition(".")[2]], fields_of(CompletionRequest)[place]
    less = {"ge": -1} if place == "top_k" else {}  # vLLM's
    assert limits_of(field) == limits_of(option) | less != {}
    assert field.description == option.description


def test_a_body_that_is_not_json_names_no_field() -> None:
    error = {"type": "json_invalid", "loc": ("body", 1), "msg": "JSON decode error"}
    refusal = of_fields([error], CompletionRequest)
    assert (refusal.message, refusal.param) == ("the body is not JSON", None)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (TEXT, {"prompt": ""}, "the prompt is empty"),
        (TEXT, {"prompt": []}, "the prompt is empty"),
        (TEXT, {"prompt": [[]]}, "the prompt is empty"),
        (TEXT, {"prompt": [10**6]}, "out of range"),
        (TEXT, {"prompt": 5}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"max_tokens": 0}, "echo=true"),
        (TEXT, {"max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": [1] * 256}, "maximum context length is 256 tokens"),
        (TEXT, {"store": True}, "store is unknown: give False"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"tools": [{"type": "retrieval"}]}, "type"),
        (CHAT, {"chat_template_kwargs": {"chat_template": "x"}}, "the server's"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "does not read"),
        (TEXT, {"max_tokens": "5"}, "max_tokens"),
        (TEXT, {"max_tokens": True}, "max_tokens"),
        (TEXT, {"prompt": "word " * 300}, "maximum context length is 256 tokens here, and the prompt has"),
        (TEXT, {"prompt": "word " * 30_000}, "maximum context length is 256 tokens here"),
        (TEXT, {"temperature": -1}, "temperature"),
        (TEXT, {"temperature": "warm"}, "temperature is not a number: give one in [0, 1e+30] (0 is greedy)"),
        (TEXT, {"temperature": True}, "temperature is not a number"),
        (TEXT, {"top_p": 0}, "top_p"),
        (TEXT, {"logprobs": 21}, "logprobs is out of range: give a whole number in [0, 20]"),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (TEXT, {"logit_bias": {"1": 1000}}, "logit_bias"),
        (TEXT, {"logit_bias": {"1000000": 1}}, "out of range"),
        (TEXT, {"stop": [""]}, "stop.0: String should have at least 1 character"),
        (TEXT, {"stop": ["x"] * 65}, "stop: List should have at most 64 items"),
        (TEXT, {"stop_token_ids": [10**6]}, "out of range"),
        (TEXT, {"n": 0}, "n is out of range: give a whole number in [1, 1024]"),
        (TEXT, {"n": 33, "prompt": ["a", "b"]}, "66 texts in one request"),
        (TEXT, {"stream_options": {"include_usage": True}}, "stream=true"),
        (TEXT, {"sprinter": {"method": "sprinter(tau=2)"}}, "tau"),
        (TEXT, {"sprinter": {"method": "nothing"}}, "nothing"),
        (
            TEXT,
            {"sprinter": {"method": "sprinter", "budget": 1.5}},
            "budget is out of range: give a number in [0, 1]",
        ),
        (TEXT, {"sprinter": {"budget": "much"}}, "budget"),
        (TEXT, {"sprinter": {"budget": 0.1}}, "needs a lossy method"),
        (TEXT, {"sprinter": {"method": "speculative", "speculation": False}}, "exclude each other"),
        (TEXT, {"sprinter": {"method": "sprinter", "require_lossless": True}}, "is lossy"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "no content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        (CHAT, {"top_logprobs": 2}, "logprobs=true"),
        (CHAT, {"max_completion_tokens": 5}, "say the same thing"),
        (CHAT, {"max_tokens": 0}, "give 1 or more"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_named(server: Running, path: str, fields: dict[str, Any], message: str) -> None:
    body = {"prompt": "secret words"} if path == TEXT else {"messages": SAID}
    answer = server.post(path, {**body, "max_tokens": 4, **fields})
    error = refusal(answer)
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert message in error["message"] and "secret" not in error["message"]
    assert error["param"] is None or not error["param"].endswith((".str", ".int", ".float", ".bool"))
    assert "max_new_tokens" not in error["message"]


def test_without_a_chat_template_completions_are_named(server: Running, template: Any) -> None:
    template(None)
    for path, body in ((CHAT, {"messages": SAID}), ("/v1/responses", {"input": "Hi"})):
        answer = server.post(path, body)
        error = refusal(answer)
        assert (answer.status_code, error["code"]) == (400, "no_chat_template")
        assert "ask for a completion" in error["message"] and "tokenizer" not in error["message"]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 50_000,
    b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    b'{"prompt": "\\ud800", "max_tokens": 1}',
], ids=lambda body: body[:24].decode("latin-1"))  # fmt: skip
def test_broken_bodies_are_mistakes_of_the_client(server: Running, body: bytes) -> None:
    with server.http() as http:
        answer = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and refusal(answer)["type"] == "invalid_request_error"


def test_paths_methods_and_types(server: Running) -> None:
    with server.http() as http:
        for path in ("/nothing", "/../../etc/passwd", "/v1/models/..%2f..%2fetc/passwd", "/docs", "/health/"):
            answer = http.get(path)
            assert answer.status_code == 404 and "passwd" not in json.dumps(refusal(answer)["code"])
        assert http.get(TEXT).status_code == 405
        form = http.post(TEXT, content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
        assert form.status_code == 415
        preflight = http.options(
            TEXT, headers={"origin": "https://else.where", "access-control-request-method": "POST"}
        )
        assert preflight.status_code == 405 and "access-control-allow-origin" not in preflight.headers
        rebound = http.get("/v1/models", headers={"host": "else.where"})
        assert rebound.status_code == 403 and refusal(rebound)["code"] == "wrong_host"
        assert http.get("/v1/models", headers={"host": "localhost:1234"}).status_code == 200


def test_request_ids_are_given_and_kept(server: Running) -> None:
    with server.http() as http:
        assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for bad in ("a b", "x" * 65, "<script>"):
            found = http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]
            assert found != bad and len(found) == 32


# --- keys, rates, sizes -----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def strict(pair: sprinter.Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# of the tests\nalice alice-secret-key-1\nbob-secret-key-22222\n")
    limits = {
        "rate_limit": 6,
        "max_body_bytes": 1000,
        "max_prompt_tokens": 8,
        "max_new_tokens": 4,
        "max_choices": 2,
    }
    with serving(pair, rows=1, api_keys=keys, require_lossless=True, refuse_long=True, **limits) as found:
        yield found, keys


def test_keys_rates_and_limits(strict: tuple[Running, Path]) -> None:
    server, _ = strict
    alice, bob = (
        {"authorization": f"Bearer {key}"} for key in ("alice-secret-key-1", "bob-secret-key-22222")
    )
    for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic alice-secret-key-1"}):
        for path in ("/v1/models", "/metrics", "/nothing"):
            with server.http() as http:
                answer = http.get(path, headers=wrong)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            assert refusal(answer)["type"] == "authentication_error"
    with server.http() as http:
        assert http.get("/health").status_code == 200
    with server.openai("wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()

    large = server.post(TEXT, {"prompt": "x" * 2000}, headers=alice)
    assert large.status_code == 413 and refusal(large)["code"] == "body_too_large"
    for fields, message in (
        ({"prompt": "word " * 20}, "maximum context length is 8 tokens"),
        ({"max_tokens": 5}, "give at most 4"),
        ({"n": 3}, "at most 2"),
        ({"sprinter": {"method": "draft-only"}}, "is lossy"),
    ):
        answer = server.post(TEXT, {"prompt": "a", "max_tokens": 1, **fields}, headers=alice)
        assert answer.status_code == 400 and message in refusal(answer)["message"]
    with server.openai("alice-secret-key-1") as client:  # the sixth request
        chat = client.completions.create(model="builtin", prompt="The river", max_tokens=4)
    assert chat.usage is not None and chat.usage.completion_tokens == 4
    slow = server.post(TEXT, {"prompt": "a"}, headers=alice)
    assert slow.status_code == 429 and refusal(slow)["code"] == "rate_limit_exceeded"
    assert 1 <= int(slow.headers["retry-after"]) <= 60
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}, headers=bob).status_code == 200


def test_keys_are_read_again_and_none_is_valid_if_the_file_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "keys", [0.0]
    file.write_text("alice alice-secret-key-1\n")
    keys = ApiKeys(file, lambda: now[0])
    assert keys.owner("alice-secret-key-1") == "alice" and keys.owner("bob-secret-key-22222") is None
    file.write_text("bob-secret-key-22222 # new\n")
    assert keys.owner("alice-secret-key-1") == "alice", "looked at once a second"
    now[0] = 2.0
    assert keys.owner("alice-secret-key-1") is None
    assert (keys.owner("bob-secret-key-22222") or "").startswith("key-")
    good = "bob-secret-key-22222 # new\n"
    for broken, reason in (
        ("short", "keys_refused"),
        ("a b c", "keys_refused"),
        ("bob bøb-secret-key-22222", "keys_refused"),  # headers are ASCII
        ("# nothing", "keys_revoked"),
        ("", "keys_revoked"),
        (None, "keys_revoked"),
    ):
        caplog.clear()
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        for _ in range(3):
            now[0] += 2
            assert keys.owner("bob-secret-key-22222") is None
        assert [one.getMessage() for one in caplog.records if one.levelname == "ERROR"] == [reason]
        with pytest.raises(UserError, match="keys"):
            ApiKeys(file)
        file.write_text(good)
        now[0] += 2
        assert keys.owner("bob-secret-key-22222") is not None
    file.write_text(f"alice short\n{good}")  # a mistake in one line is no matter of the others
    now[0] += 2
    assert keys.owner("bob-secret-key-22222") is not None


def test_files_of_keys_have_marks_comments_and_modes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeffalice alice-#secret-key-1#x # her\n#bob bob-secret-key-22222\n", encoding="utf-8")
    file.chmod(0o600)
    keys = ApiKeys(file)
    assert not caplog.records
    assert keys.owner("alice-#secret-key-1#x") == "alice" and keys.owner("bob-secret-key-22222") is None
    file.chmod(0o644)
    ApiKeys(file)
    assert [one.getMessage() for one in caplog.records] == ["keys_exposed"]
    file.chmod(0o666)
    with pytest.raises(UserError, match="written by everyone: chmod 600"):
        ApiKeys(file)


def test_wrong_keys_are_slowed_and_right_ones_never(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", [0.0]
    file.write_text("alice alice-secret-key-1\nbob bob-secret-key-22222\n")
    keys = ApiKeys(file, lambda: now[0])
    assert [keys.admit(f"guess-{i}", "a") for i in range(10)] == [(None, 0.0)] * 10
    assert keys.admit("", "a") == (None, 0.0)
    owner, wait = keys.admit("guess", "a")
    assert owner is None and wait == pytest.approx(6)
    assert keys.admit("bob-secret-key-22222", "a") == ("bob", 0.0), "others may be behind the same proxy"
    assert keys.admit("guess", "b") == (None, 0.0)
    now[0] = 6.0
    assert keys.admit("guess", "a") == (None, 0.0)


@pytest.mark.parametrize(("address", "owner"), [
    ("10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"), ("::1", "::1"),
    ("::ffff:10.0.0.7", "10.0.0.7"), ("fe80::1%eth0", "fe80::/64"), ("testclient", "testclient"),
])  # fmt: skip
def test_an_owner_is_a_network_of_ipv6(address: str, owner: str) -> None:
    assert network_of(address) == owner


def test_limits_count_texts_and_tokens() -> None:
    now = [0.0]
    rate = RateLimit(600, lambda: now[0])
    assert (
        rate.wait_s("a", 590) == 0 and rate.wait_s("a", 20) == pytest.approx(1) and rate.wait_s("b", 20) == 0
    )
    rate.give_back("a", 580)
    assert rate.wait_s("a", 580) == 0
    now[0] = 59.0
    assert rate.wait_s("a", 10_000) == pytest.approx(0.0) and rate.wait_s("a") > 900, "a debt"


@pytest.mark.parametrize("texts", [5, 6, 40])
def test_whoever_comes_again_when_told_gets_several_texts(texts: int) -> None:
    """The guard counts one text of a request, each time it comes, and the others are counted later."""
    now = [0.0]
    rate = RateLimit(6, lambda: now[0])
    assert [rate.wait_s("a") for _ in range(4)] == [0.0] * 4
    assert rate.wait_s("a") == 0.0
    now[0] = float(math.ceil(rate.wait_s("a", texts, paid=1)))
    assert now[0] > 0
    assert rate.wait_s("a") == 0.0 and rate.wait_s("a", texts, paid=1) == 0.0
    assert rate.wait_s("a", texts, paid=1) > 0


def test_a_rate_is_a_minutes_requests_and_then_an_even_flow() -> None:
    now = [0.0]
    rate = RateLimit(6, lambda: now[0])
    assert [rate.wait_s("a") for _ in range(6)] == [0.0] * 6
    assert rate.wait_s("a") == pytest.approx(10) and rate.wait_s("b") == 0
    now[0] = 5.0
    assert rate.wait_s("a") == pytest.approx(5)
    now[0] = 10.0
    assert rate.wait_s("a") == 0 and rate.wait_s("a") == pytest.approx(10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, "is reached by other machines"),
        ({"host": "example.org"}, "is reached by other machines"),
        ({"port": 70000}, "port"),
        ({"rows": 0}, "rows"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"queue_timeout_s": 0}, "queue_timeout_s=0 is out of range: give a number > 0"),
        ({"api_keys": "x"}, r"api_keys='x' is wrong \(Input should be an instance of Path\)"),
        ({"tls_cert": Path("x")}, "go together"),
    ],
    ids=str,
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServeSettings(**settings)


def test_other_machines_are_let_in_with_keys_or_on_purpose(tmp_path: Path) -> None:
    assert ServeSettings(host="localhost").is_loopback and ServeSettings(host="::1").is_loopback
    assert not ServeSettings(host="0.0.0.0", allow_anonymous=True).is_loopback
    assert not ServeSettings(host="0.0.0.0", api_keys=tmp_path / "keys").is_loopback


def test_messages_name_no_directory_of_the_server() -> None:
    error = UserError(
        "the draft /srv/models/org.d/draft.gguf has no gate: give max_new_tokens=1/2, org/a/b.gguf, /x or "
        "https://example.com/docs/page, see /v1/chat/completions"
    )
    assert of_error(error).message == (
        "the draft draft.gguf has no gate: give max_tokens=1/2, org/a/b.gguf, /x or "
        "https://example.com/docs/page, see /v1/chat/completions"
    )
