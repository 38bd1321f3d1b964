"""Reasoning, content and tool calls apart, whole and in a stream, by the template of each family of models."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tests.serve.server import TEMPLATE, Running, serving, tokens

import sprinter
from sprinter.engine.prompt import EncodedPrompt
from sprinter.errors import UserError
from sprinter.serve.api_errors import Refusal
from sprinter.serve.message_parsing import joined, parts_of

CHAT = "/v1/chat/completions"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
    },
}  # fmt: skip
# what the chat templates of these families have
HERMES = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
CODER = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call><function=...>{% endif %}"
MISTRAL = TEMPLATE + "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }} [TOOL_CALLS]{% endif %}"
LLAMA = (
    TEMPLATE + '{% if tools %}{{ tools | tojson }} {"name": name, "parameters": dictionary of ...}{% endif %}'
)
THINKING = (
    TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
BOTH = THINKING + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
CALL = '{"name": "weather", "arguments": {"place": "Rome", "days": 2}}'
SAID: list[Any] = [{"role": "user", "content": "Weather?"}]
ARGUMENTS = {"place": "Rome", "days": 2}


def read(
    pair: sprinter.Pair, text: str, size: int, prompt: str = "assistant:", **options: Any
) -> dict[str, Any]:
    """The message that a text is, with each call's name and arguments alone."""
    parts = parts_of(pair.tokenizer, EncodedPrompt([1], prompt, SAID), (0,), **options)
    found = joined([*(parts.feed([token]) for token in tokens(text, size)), parts.finish()])
    for call in found.get("tool_calls", ()):
        assert call["id"].startswith("call_") and call["type"] == "function"
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in found.pop("tool_calls", ())
    ]
    assert parts.calls == len(calls)
    return found | ({"calls": calls} if calls else {})


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, "Sunny.", "Sunny.", 0),
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", None, 1),
        (HERMES, f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>", "I look.", 2),
        (HERMES, f"<tool_call>\n{CALL}", None, 1),  # cut behind the call
        (HERMES, '<tool_call>\n{"name": "wea\n</tool_call>', '<tool_call>\n{"name": "wea\n</tool_call>', 0),
        (HERMES, "<tool_call>\n[7]\n</tool_call>", "<tool_call>\n[7]\n</tool_call>", 0),
        (HERMES, "a < b <tool> c", "a < b <tool> c", 0),
        (HERMES, CALL, None, 1),
        (HERMES, f"```json\n{CALL}\n```", None, 1),
        (HERMES, f"\n```\n{CALL}\n{CALL}\n```\n", None, 2),
        (HERMES, CALL.replace("weather", "climate"), CALL.replace("weather", "climate"), 0),  # no tool of this name
        (HERMES, '{"name": "Rome", "size": 2}', '{"name": "Rome", "size": 2}', 0),
        (HERMES, f"{CALL}\nThat is it.", f"{CALL}\nThat is it.", 0),
        (HERMES, f"So: {CALL}", f"So: {CALL}", 0),
        (HERMES, "```json\n[1]\n```", "```json\n[1]\n```", 0),
        (CODER, "<tool_call>\n<function=weather>\n<parameter=place>\nRome\n</parameter>\n<parameter=days>\n2\n"
         "</parameter>\n</function>\n</tool_call>", None, 1),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]", None, 2),
        (MISTRAL, '[TOOL_CALLS]weather[ARGS]{"place": "Rome", "days": 2}', None, 1),
        (LLAMA, CALL.replace("arguments", "parameters"), None, 1),
        (LLAMA, f"<|python_tag|>{CALL}; {CALL}", None, 2),
        (LLAMA, f"It is {CALL}", f"It is {CALL}", 0),
        (LLAMA, '{"name": "weather", ', '{"name": "weather", ', 0),
    ],
)  # fmt: skip
def test_calls_are_read_as_the_family_writes_them(
    pair: sprinter.Pair, template: Any, form: str, text: str, content: str | None, calls: int, size: int
) -> None:
    template(form)
    found = read(pair, text, size, tools=[TOOL])
    assert found.get("calls", []) == [("weather", ARGUMENTS)] * calls
    shown = found.get("content")
    assert shown == content or (size > 1 and shown is not None and shown.split() == (content or "").split())


@pytest.mark.parametrize("form", [HERMES, CODER, MISTRAL, LLAMA, BOTH])
@pytest.mark.parametrize(
    "before", ["", "<think>", "<tool_call>", "<tool_call><function=weather><parameter=place>"]
)
def test_much_white_space_is_read_once(pair: sprinter.Pair, template: Any, form: str, before: str) -> None:
    template(form)
    began = time.thread_time()
    found = read(pair, f"{before}{' ' * 40_000}x</parameter>", 1000, tools=[TOOL])
    assert "x" in str(found)
    assert time.thread_time() - began < 1, "it is looked at again from each of its places"


@pytest.mark.parametrize("kind", [{"anyOf": 5}, {"anyOf": [{"oneOf": 1}]}])
def test_types_that_say_nothing_fail_no_request(pair: sprinter.Pair, template: Any, kind: Any) -> None:
    template(CODER)
    said = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": kind}}}}
    assert "1" in read(pair, said, 3, tools=[tool])["content"]


def test_only_what_may_become_a_call_is_held_back(pair: sprinter.Pair, template: Any) -> None:
    """Without marks a call is known at its end; other text is sent as soon as it is other text."""
    template(HERMES)
    parts = parts_of(pair.tokenizer, EncodedPrompt([1], "assistant:", SAID), (0,), tools=[TOOL])
    assert parts.feed(tokens("```json\n{", 1)) == {}
    assert parts.feed(tokens('\n "names"', 1))["content"].startswith('```json\n{\n "names')
    assert parts.feed(tokens(": 2}", 1)) == {"content": ": 2}"}


def test_one_call_is_returned_where_several_are_not_wanted(pair: sprinter.Pair, template: Any) -> None:
    template(HERMES)
    text = f"<tool_call>\n{CALL}\n</tool_call>\n" * 2
    assert len(read(pair, text, 4, tools=[TOOL], several=False)["calls"]) == 1
    assert read(pair, text, 4) == {"content": text}, "no tools were offered"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_reasoning_is_apart(pair: sprinter.Pair, template: Any, size: int) -> None:
    template(BOTH)
    apart = {"reasoning_content": "First,\nsecond.", "content": "Done: <b>"}
    assert read(pair, "<think>\nFirst,\nsecond.\n</think>\n\nDone: <b>", size) == apart
    opened = read(pair, "First,\nsecond.\n</think>\n\nDone: <b>", size, "assistant:<think>\n")
    assert opened == apart, "the template has begun it"
    assert read(pair, "<think>\nFirst", size) == {"reasoning_content": "First"}
    found = read(pair, f"<think>\nI call.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", size, tools=[TOOL])
    assert found == {"reasoning_content": "I call.", "calls": [("weather", ARGUMENTS)]}
    parts = parts_of(pair.tokenizer, EncodedPrompt([1], "x", SAID), (0,))
    parts.feed(tokens("<think>abc</think>de", 1))
    assert parts.reasoning_tokens == 3


def test_a_tokenizers_own_response_template_counts(
    pair: sprinter.Pair, template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template(TEMPLATE + "{{ tools }}")
    call = {"open": "<<", "close": ">>", "repeats": True, "content": "json"}
    own = {"start_anchor": "assistant:", "fields": {"thinking": {"open": "(", "close": ")"}, "tool_calls": call,
                                                    "content": {}}}  # fmt: skip
    with pytest.raises(Refusal, match="is not known"):
        read(pair, "", 1, tools=[TOOL])
    monkeypatch.setattr(pair.tokenizer, "response_template", own)
    found = read(pair, f"(hm)So<<{CALL}>>", 2, tools=[TOOL])
    assert found == {"reasoning_content": "hm", "content": "So", "calls": [("weather", ARGUMENTS)]}
    assert read(pair, "So<<{>> more", 1, tools=[TOOL])["content"].startswith("So{")


# --- through the server -----------------------------------------------------------------------------------------------
def asked(pair: sprinter.Pair, **more: Any) -> dict[str, Any]:
    ends = {str(pair.models.target.eos_ids[0]): 100}
    return {"model": "builtin", "messages": SAID, "seed": 1, "logit_bias": ends, **more}


def test_tools_are_called_through_openais_client(
    server: Running, pair: sprinter.Pair, template: Any, says: Any
) -> None:
    template(BOTH)
    says(f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>")
    request: Any = asked(pair, tools=[TOOL], tool_choice="auto")
    with server.openai() as client:
        whole = client.chat.completions.create(**request).choices[0]
        events = list(client.chat.completions.create(**request, stream=True))
    message: Any = whole.message
    assert (
        whole.finish_reason == "tool_calls"
        and message.content == "I look."
        and message.reasoning_content == "Hm."
    )
    (call,) = message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == ARGUMENTS
    deltas: list[Any] = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    (streamed,) = [one for delta in deltas for one in delta.tool_calls or ()]
    assert streamed.index == 0 and json.loads(streamed.function.arguments) == ARGUMENTS
    assert events[-1].choices[0].finish_reason == "tool_calls"
    back = [
        *SAID, {**message.model_dump(), "role": "assistant"},
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}, {"role": "user", "content": "And?"},
    ]  # fmt: skip
    with pytest.raises(Exception, match="which the chat template does not read"):
        client_again(server, request | {"messages": back})
    template(BOTH + "{# 'tool' tool_calls #}")
    assert client_again(server, request | {"messages": back, "tool_choice": "none"}).choices


def test_several_calls_are_streamed(server: Running, pair: sprinter.Pair, template: Any, says: Any) -> None:
    """Each in an event when it is complete, with its index and an id of its own; then the reason of the end."""
    template(BOTH)
    other = CALL.replace("Rome", "Oslo")
    says(f"I look.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{other}\n</tool_call>")
    with server.openai() as client:
        events = list(client.chat.completions.create(**asked(pair, tools=[TOOL], stream=True)))
    calls = [one for event in events for one in event.choices[0].delta.tool_calls or ()]
    assert [one.index for one in calls] == [0, 1] and len({one.id for one in calls}) == 2
    found = [json.loads(one.function.arguments) for one in calls]
    assert found == [ARGUMENTS, ARGUMENTS | {"place": "Oslo"}]
    assert {one.function.name for one in calls} == {"weather"} and {one.type for one in calls} == {"function"}
    assert "".join(event.choices[0].delta.content or "" for event in events) == "I look."
    assert [event.choices[0].finish_reason for event in events if event.choices[0].finish_reason] == [
        "tool_calls"
    ]


def client_again(server: Running, request: Any) -> Any:
    with server.openai() as client:
        return client.chat.completions.create(**request)


def test_only_calls_and_thinking_have_no_content(
    server: Running, pair: sprinter.Pair, template: Any, says: Any
) -> None:
    template(BOTH)
    says(f"<tool_call>\n{CALL}\n</tool_call>")
    message = server.post(CHAT, asked(pair, tools=[TOOL])).json()["choices"][0]["message"]
    assert (
        message["content"] is None
        and len(message["tool_calls"]) == 1
        and "index" not in message["tool_calls"][0]
    )


def test_thinking_is_turned_off_by_the_template(server: Running, pair: sprinter.Pair, template: Any) -> None:
    template(THINKING)
    usual = server.post(CHAT, asked(pair)).json()["usage"]["prompt_tokens"]
    for more in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "minimal"}):
        assert server.post(CHAT, asked(pair, **more)).json()["usage"]["prompt_tokens"] > usual
    assert server.post(CHAT, asked(pair, reasoning_effort="high")).json()["usage"]["prompt_tokens"] == usual


# --- lossy in a part of the text --------------------------------------------------------------------------------------
def test_lossy_methods_are_confined_to_a_part_of_the_text(pair: sprinter.Pair) -> None:
    body = {
        "prompt": "The river rises in",
        "max_tokens": 8,
        "seed": 1,
        "sprinter": {"method": "sprinter(tau=0.2)"},
    }
    with serving(pair, only="think") as found:
        confined = found.post("/v1/completions", body).json()["choices"][0]["sprinter"]
        named = {**body, "sprinter": {"method": "sprinter(tau=0.2)", "only": "not-think"}}
        outside = found.post("/v1/completions", named).json()["choices"][0]["sprinter"]
        exact = found.post("/v1/completions", {**body, "sprinter": {"method": "speculative"}}).json()
    assert "only=think" in confined["method"] and confined["origins"]["trusted"] == 0
    assert "only=not-think" in outside["method"] and outside["origins"]["trusted"] > 0
    assert "only" not in exact["choices"][0]["sprinter"]["method"]
    with pytest.raises(UserError, match="span"), serving(pair, only="thinking"):
        pass


@pytest.mark.parametrize("method", ["relaxed(top_k=10, delta=0.9)", "sprinter(tau=0.2)"])
def test_the_answer_after_lossy_reasoning_is_exact(pair: sprinter.Pair, template: Any, method: str) -> None:
    """Token by token: drift within ``<think>``, none behind it."""
    pytest.importorskip("llguidance", reason="it is not a dependency of the tests")
    template(TEMPLATE + "<think>\n{# </think> #}")
    body = {
        "messages": SAID, "max_tokens": 120, "seed": 1, "sprinter": {"method": method, "tokens": True},
        "structured_outputs": {"regex": "[a-z ]{40}</think>[a-z ]{60}"},
    }  # fmt: skip
    inside, outside = list[float](), list[float]()
    with serving(pair, only="think") as found:
        for seed in range(3):
            answer = found.post(CHAT, body | {"seed": seed})
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["message"]["reasoning_content"] and choice["message"]["content"]
            text, report = "", choice["sprinter"]
            assert "only=think" in report["method"] and not report["lossless"]
            for token in report["tokens"]:
                (outside if "</think>" in text else inside).append(token["drift"] or 0.0)
                text += token["text"]
    assert sum(inside) > 0.1 and len(outside) > 20 and max(outside) <= 1e-6
