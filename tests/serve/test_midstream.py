"""What goes wrong, or ends, in the middle of an answer: errors in events, stop strings in calls and in JSON, crowds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from tests.engine.conftest import fail_pass
from tests.serve.server import TEMPLATE, Running, serving, until

import sprinter
from sprinter.engine.grammar import Grammars

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SAID: list[Any] = [{"role": "user", "content": "Where does the river rise?"}]
SPECULATIVE = {"sprinter": {"method": "speculative(gamma=3)"}}
pytest.importorskip("llguidance", reason="it is not a dependency of the tests")

FAILED = "the server has failed at this request"
TOOLS = TEMPLATE + "{% if tools %}{{ tools | length }}<tool_call>{% endif %}"


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, without its last line."""
    return [
        json.loads(line[6:])
        for line in text.splitlines()
        if line.startswith("data: ") and line != "data: [DONE]"
    ]


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


# --- errors -----------------------------------------------------------------------------------------------------------
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": SAID}, TEXT: {"prompt": "The river"}, RESPONSES: {"input": "Where does the river rise?"},
}  # fmt: skip


@pytest.mark.parametrize("path", ASKED)
def test_an_error_in_the_middle_is_the_last_event(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A pass fails when some text was sent: the events end at once, by the error, and the next request is served."""
    asked = {**ASKED[path], "stream": True, "seed": 1, **SPECULATIVE}
    asked["max_output_tokens" if path == RESPONSES else "max_tokens"] = 100
    with monkeypatch.context() as patch:
        fail_pass(patch, 16, RuntimeError("the device is gone"))
        answer = server.post(path, asked)
    assert answer.status_code == 200
    *before, last = events_of(answer.text)
    assert len(before) >= 3 and not [one for one in before if one.get("error") or one.get("type") == "error"]
    told = last if path == RESPONSES else last["error"]
    assert told["message"] == FAILED and "device" not in answer.text
    assert path != RESPONSES or last["type"] == "error"
    assert path == RESPONSES or answer.text.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"' not in answer.text and "response.completed" not in answer.text
    until(lambda: server.service.engine.unfinished == 0)
    assert server.post(path, {**asked, "stream": False}).status_code == 200


def test_a_client_raises_the_error_and_does_not_wait(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_pass(monkeypatch, 16, RuntimeError("the device is gone"))
    read: list[Any] = []
    asked: Any = {"model": "builtin", "messages": SAID, "max_tokens": 100, "extra_body": SPECULATIVE}
    with server.openai() as client:
        events = client.chat.completions.create(**asked, stream=True)
        with pytest.raises(openai.APIError, match=FAILED):
            _ = [read.append(event) for event in events]
    assert len(read) >= 2


def test_an_error_of_one_text_ends_all_of_its_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three texts has a rule that fails; another request goes on."""
    engine = server.service.engine._engine
    real, failed = type(engine)._note, list[int]()

    def note(self: Any, one: Any) -> None:
        if one.request.options.max_new_tokens == 90 and len(one.request.record.tokens) > 9 and not failed:
            failed.append(one.id)
            one.run.fail(RuntimeError("a rule has failed"))
        real(self, one)

    monkeypatch.setattr(type(engine), "_note", note)
    other: list[Any] = []
    thread = threading.Thread(
        target=lambda: other.append(server.post(TEXT, {"prompt": "A", "max_tokens": 80}))
    )
    thread.start()
    answer = server.post(TEXT, {"prompt": "The", "n": 3, "max_tokens": 90, "stream": True, **SPECULATIVE})
    thread.join(30)
    events = events_of(answer.text)
    assert events[-1]["error"]["message"] == FAILED and answer.text.endswith("data: [DONE]\n\n")
    assert {choice["index"] for one in events[:-1] for choice in one["choices"]} == {0, 1, 2}
    assert other[0].status_code == 200 and other[0].json()["usage"]["completion_tokens"] > 0
    until(lambda: server.service.engine.unfinished == 0)


def test_time_that_is_over_in_the_middle_is_an_error_event(pair: sprinter.Pair) -> None:
    with serving(pair, rows=1, max_len=256, request_timeout_s=1.0) as server:
        engine = server.service.engine._engine
        real, stuck = engine.step, threading.Event()

        def step() -> Any:
            found = real()
            if any(event.tokens for event in found):  # the next step does not come
                engine.step = lambda: (stuck.wait(3) and []) or real()  # type: ignore[method-assign]
            return found

        engine.step = step  # type: ignore[method-assign]
        try:
            answer = server.post(TEXT, {"prompt": "The", "max_tokens": 200, "stream": True, **SPECULATIVE})
        finally:
            stuck.set()
            engine.step = real  # type: ignore[method-assign]
        events = events_of(answer.text)
        assert events[-1]["error"]["code"] == "timeout" and "choices" in events[0]
        assert answer.text.endswith("data: [DONE]\n\n")


# --- stop strings -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_json_in_its_middle(server: Running, stream: bool) -> None:
    """As everywhere: the text ends before it, whatever the schema still asks for."""
    asked = {
        "messages": SAID,
        "max_tokens": 100,
        "seed": 3,
        **form(closed({"deep": {"type": "boolean"}, "kind": {"enum": ["lake"]}})),
    }
    whole = server.post(CHAT, asked).json()["choices"][0]["message"]["content"]
    assert json.loads(whole)["kind"] == "lake"
    for stop in ("kind", ', "', '"deep": '):
        answer = server.post(CHAT, {**asked, "stop": [stop], "stream": stream})
        if stream:
            choices = [one["choices"][0] for one in events_of(answer.text)]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            reason = choices[-1]["finish_reason"]
        else:
            choice = answer.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        assert (text, reason) == (whole[: whole.index(stop)], "stop")
    assert (
        server.post(CHAT, {**asked, "stop": ["nowhere"]}).json()["choices"][0]["message"]["content"] == whole
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_a_call_leaves_no_call(server: Running, template: Any, stream: bool) -> None:
    """Arguments that are no JSON would break clients: what was written of the call is content."""
    template(TOOLS)
    schema = closed({"deep": {"type": "boolean"}, "kind": {"enum": ["lake", "spring"]}})
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    asked = {"messages": SAID, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False,
             "max_tokens": 150, "seed": 2}  # fmt: skip
    (call,) = server.post(CHAT, asked).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]).keys() == {"deep", "kind"}
    answer = server.post(CHAT, {**asked, "stop": ["kind"], "stream": stream})
    if stream:
        choices = [one["choices"][0] for one in events_of(answer.text)]
        message: dict[str, Any] = {"content": "".join(one["delta"].get("content") or "" for one in choices)}
        assert not [one for one in choices if one["delta"].get("tool_calls")]
        reason = choices[-1]["finish_reason"]
    else:
        message = answer.json()["choices"][0]["message"]
        reason = answer.json()["choices"][0]["finish_reason"]
        assert not message.get("tool_calls")
    assert reason == "stop" and "look" in message["content"] and "kind" not in message["content"]


# --- crowds -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def double() -> Iterator[Running]:
    """The built-in pair in float64, in which a text does not depend on the other rows' last bits."""
    found = sprinter.load_pair(dtype="float64", compile=False)
    assert found.tokenizer is not None
    found.tokenizer.chat_template = TEMPLATE
    with serving(found, rows=6) as server:
        yield server


def test_texts_of_a_seed_are_the_same_in_a_crowd(double: Running) -> None:
    """Schemas, regular expressions and free texts at once, by several methods: each is what it is alone."""
    confined: list[dict[str, Any]] = [
        form(
            closed({"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer", "maximum": 99}})
        ),
        {"structured_outputs": {"regex": "[a-d]{6,9}!"}},
        {"structured_outputs": {"choice": ["left", "right", "straight on"]}},
        {},
    ]
    asked = [
        {
            "messages": SAID,
            "seed": seed,
            "max_tokens": 24,
            "temperature": 1.0,
            **one,
            "sprinter": {"method": method},
        }
        for seed, method in enumerate(("autoregressive", "speculative(gamma=3)", "lookup"))
        for one in confined
    ]

    def said(body: dict[str, Any]) -> str:
        answer = double.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])

    alone = [said(body) for body in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        together = list(threads.map(said, asked))
    assert together == alone
    assert len(set(alone)) > 6  # they do differ by seed


def test_many_texts_of_a_large_schema(pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema is compiled once for all texts of a request, and each text follows it."""
    compiled: list[str] = []
    real = Grammars._compile

    def compile(self: Grammars, name: str, grammar: str) -> Any:
        compiled.append(name)
        return real(self, name, grammar)

    monkeypatch.setattr(Grammars, "_compile", compile)
    kinds = [closed({"kind": {"const": f"kind{i}"}, "size": {"enum": [i, i + 1]}}) for i in range(500)]
    schema = closed({"one": {"anyOf": kinds}})
    with serving(pair, rows=4, max_len=256, max_waiting=64) as server:
        asked = {"prompt": "A", "n": 24, "max_tokens": 120, "seed": 1, **form(schema)}
        answer = server.post(TEXT, asked)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    whole = [json.loads(one["text"])["one"] for one in choices if one["finish_reason"] == "stop"]
    assert len(choices) == 24 and len(whole) >= 12
    assert all(one["size"] - int(one["kind"].removeprefix("kind")) in (0, 1) for one in whole)
    assert len(compiled) == 1
