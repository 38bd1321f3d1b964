"""``/v1/responses`` through OpenAI's client: the chat's text, in items, whole and in events."""

from __future__ import annotations

import json
import threading
from typing import Any

import openai
import pytest
from tests.serve.server import TEMPLATE, Running

import sprinter
from sprinter.serve.request_parsing import asked_of

BOTH = TEMPLATE + "{# <think> 'tool' tool_calls #}{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
CALL = '{"name": "weather", "arguments": {"days": 2}}'
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
FIXED: dict[str, Any] = {"model": "builtin", "max_output_tokens": 12, "temperature": 0}


def test_a_response_is_the_chats_text(server: Running) -> None:
    said: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}]
    chat = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}],
        "temperature": 0,
    }
    expected = server.post("/v1/chat/completions", {**chat, "max_tokens": 12}).json()
    with server.openai() as client:
        whole = client.responses.create(input=said, instructions="Be brief.", store=False, **FIXED)
        events = list(client.responses.create(input=said, instructions="Be brief.", stream=True, **FIXED))
    text = expected["choices"][0]["message"]["content"]
    assert whole.output_text == text != "" and whole.object == "response"
    assert whole.usage is not None and whole.usage.output_tokens == expected["usage"]["completion_tokens"]
    cut = expected["choices"][0]["finish_reason"] == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert events[0].type == "response.created" and events[-1].type == f"response.{whole.status}"
    last: Any = events[-1]
    assert last.response.output_text == text and last.response.usage == whole.usage
    assert last.response.model_extra["sprinter"]["new_tokens"] == whole.usage.output_tokens


def test_calls_and_reasoning_are_items(
    server: Running, pair: sprinter.Pair, template: Any, says: Any
) -> None:
    template(BOTH)
    says(f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>")
    asked: Any = {**FIXED, "extra_body": {"seed": 5, "sprinter": {"speculation": False}}, "tools": [TOOL]}
    with server.openai() as client:
        whole = client.responses.create(input="Weather?", **asked)
        events: list[Any] = list(client.responses.create(input="Weather?", stream=True, **asked))
        thinking, message, call = whole.output
        assert (thinking.type, message.type, call.type) == ("reasoning", "message", "function_call")
        assert thinking.content[0].text == "Hm." and message.content[0].text == "I look."  # type: ignore[union-attr,index]
        assert call.type == "function_call" and json.loads(call.arguments) == {"days": 2}
        kinds = [event.type for event in events]
        for kind in ("reasoning_text.delta", "output_text.done", "function_call_arguments.done"):
            assert f"response.{kind}" in kinds
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        back: Any = [
            {"role": "user", "content": "Weather?"}, thinking.model_dump(), message.model_dump(exclude_none=True),
            call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."},
        ]  # fmt: skip
        assert client.responses.create(input=back, **asked).output


@pytest.mark.parametrize(("fields", "message"), [
    ({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"), ({"input": []}, "input"),
    ({"tools": [{"type": "web_search"}]}, "type"), ({"text": {"format": {"type": "xml"}}}, "format"),
    ({"input": [{"role": "user"}]}, "no content"), ({"temperature": -1}, "temperature"),
], ids=str)  # fmt: skip
def test_what_is_not_served_is_refused(server: Running, fields: dict[str, Any], message: str) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(**{"input": "x", **FIXED, **fields})


@pytest.mark.parametrize(
    "what",
    ["NaN", "1e999", "[" * 490 + "]" * 490, "[" * 800 + "]" * 800],
    ids=["nan", "infinite", "deep", "deeper"],
)
@pytest.mark.parametrize("stream", ["true", "false"])
def test_tools_that_no_answer_could_repeat_are_refused(
    server: Running, template: Any, what: str, stream: str
) -> None:
    template(BOTH)
    parameters = f'"parameters": {{"default": {what}}}'
    for path, body in {
        "responses": f'"input": "x", "tools": [{{"type": "function", "name": "f", {parameters}}}]',
        "chat/completions": '"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, '
                            f'"tools": [{{"type": "function", "function": {{"name": "f", {parameters}}}}}]',
    }.items():  # fmt: skip
        with server.http(headers={"content-type": "application/json"}) as http:
            told = http.post(f"/v1/{path}", content=f'{{{body}, "stream": {stream}}}')
        if path == "responses" or "[" in what:
            assert told.status_code == 400 and "nested too deeply" in told.text
        else:  # the template may say it, and the answer does not
            assert told.status_code == 200 and '"error":{' not in told.text


def test_a_large_request_is_read_and_repeated_beside_the_event_loop(
    server: Running, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template(BOTH)
    threads: list[str] = []

    def noted(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return asked_of(*given)

    monkeypatch.setattr("sprinter.serve.app.asked_of", noted)
    for size in (10, 100_000):
        tool = {"type": "function", "name": "f", "description": "é" * size}
        body = {"input": "x", "max_output_tokens": 1, "tools": [tool], "tool_choice": "none", "stream": True}
        told = server.post("/v1/responses", body).text
        events = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: ")]
        whole = [event["response"] for event in events if "response" in event]
        assert len(whole) == 3 and all(one["tools"] == [tool] for one in whole)
    assert [name.startswith("sprinter-serve") for name in threads] == [False, True]


def test_an_error_ends_the_events(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.serve.responses_api.Items.add", lambda *_: 1 / 0)
    with server.http() as http:
        told = http.post("/v1/responses", json={"input": "x", "stream": True, "max_output_tokens": 3}).text
    assert told.rstrip().splitlines()[-2] == "event: error" and "internal_error" in told
