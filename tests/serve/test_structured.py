"""What a text must be: ``response_format``, ``structured_outputs`` and forced calls, through OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from tests.serve.server import TEMPLATE, Running

from sprinter.serve.schema import ChatRequest
from sprinter.serve.structured import structure_of

pytest.importorskip("llguidance", reason="it is not a dependency of the tests")

CHAT = "/v1/chat/completions"
SAID: list[Any] = [{"role": "user", "content": "Where does the river rise?"}]
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"deep": {"type": "boolean"}, "kind": {"enum": ["lake", "spring"]}},
    "required": ["deep", "kind"], "additionalProperties": False,
}  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
TOOLS = TEMPLATE + "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"


class River(BaseModel):
    deep: bool
    kind: Literal["river", "stream"]


def content(server: Running, **fields: Any) -> str:
    answer = server.post(CHAT, {"messages": SAID, "seed": 3, "max_tokens": 100, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("method", ["autoregressive", "speculative", "lookup"])
def test_an_answer_follows_its_schema(server: Running, method: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "river", "strict": True, "schema": SCHEMA}}
    found = json.loads(content(server, response_format=form, sprinter={"method": method}))
    assert found.keys() == {"deep", "kind"} and found["kind"] in ("lake", "spring")


def test_structured_outputs_are_those_of_vllm(server: Running) -> None:
    assert json.loads(content(server, structured_outputs={"json": SCHEMA})).keys() == {"deep", "kind"}
    assert re.fullmatch(r"[a-c]{3}!", content(server, structured_outputs={"regex": "[a-c]{3}!"}))
    assert content(server, structured_outputs={"choice": ["left", "right"]}) in ("left", "right")
    assert content(server, structured_outputs={"grammar": 'start: "yes" | "no"'}) in ("yes", "no")
    text = server.post(
        "/v1/completions", {"prompt": "A", "max_tokens": 9, "structured_outputs": {"regex": "[xy]{4}"}}
    )
    assert re.fullmatch("[xy]{4}", text.json()["choices"][0]["text"])


def test_openais_client_parses_a_model(server: Running) -> None:
    with server.openai() as client:
        found = client.chat.completions.parse(model="builtin", messages=SAID, response_format=River, seed=1)
        said = client.responses.parse(model="builtin", input="Where?", text_format=River)
    assert isinstance(found.choices[0].message.parsed, River) and isinstance(said.output_parsed, River)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "look"}}], ids=["required", "named"]
)
def test_a_call_is_forced(server: Running, template: Any, choice: Any) -> None:
    template(TOOLS)
    asked: Any = {"model": "builtin", "messages": SAID, "tools": [TOOL], "tool_choice": choice, "seed": 2,
                  "parallel_tool_calls": False, "max_tokens": 150}  # fmt: skip
    with server.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        events = list(client.chat.completions.create(**asked, stream=True))
    (call,) = whole.message.tool_calls or ()
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.type == "function" and call.function.name == "look"
    assert json.loads(call.function.arguments).keys() == {"deep", "kind"}
    (streamed,) = [one for event in events for one in event.choices[0].delta.tool_calls or ()]
    assert streamed.function is not None and streamed.function.arguments == call.function.arguments
    cut = server.post(CHAT, {**asked, "max_tokens": 3}).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"]


def test_a_call_is_forced_whose_parameters_refer_to_their_own_definitions(
    server: Running, template: Any
) -> None:
    template(TOOLS.replace("tools | tojson", "tools | length"))
    place = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"],
             "additionalProperties": False}  # fmt: skip
    schema = {"type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"],
              "additionalProperties": False, "$defs": {"Place": place}}  # fmt: skip
    tools = [TOOL, {"type": "function", "function": {"name": "go", "parameters": schema}}]
    for seed in range(4):
        body = {"messages": SAID, "tools": tools, "tool_choice": "required", "parallel_tool_calls": False,
                "max_tokens": 150, "seed": seed}  # fmt: skip
        answer = server.post(CHAT, body)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert found.keys() == ({"deep", "kind"} if call["function"]["name"] == "look" else {"at"})
        assert "at" not in found or found["at"]["deep"] in (True, False)


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "go"}}], ids=["any", "named"]
)
@pytest.mark.parametrize(
    ("more", "closed"), [({}, True), ({"additionalProperties": True}, False), ({"allOf": []}, False)]
)
def test_a_forced_call_has_no_arguments_of_which_its_schema_does_not_speak(
    choice: Any, more: dict[str, Any], closed: bool
) -> None:
    schema = {"type": "object", "properties": {"deep": {"type": "boolean"}}, **more}
    tool = {"type": "function", "function": {"name": "go", "parameters": schema}}
    body = ChatRequest.model_validate({"messages": SAID, "tools": [tool], "tool_choice": choice})
    found = structure_of(body)["response_format"]["json_schema"]["schema"]
    if choice == "required":
        (call,) = found["items"]["anyOf"]
        found = call["properties"]["arguments"]
    assert found == (schema | {"additionalProperties": False} if closed else schema)


@pytest.mark.parametrize(("fields", "message"), [
    ({"response_format": {"type": "json_schema"}}, "json_schema goes with"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "exclude each other"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exclude each other"),
    ({"structured_outputs": {"regex": "("}}, "regex cannot be followed"),
    ({"tool_choice": "required"}, "goes with tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "none of the tools"),
], ids=str)  # fmt: skip
def test_mistakes_are_named(server: Running, fields: dict[str, Any], message: str) -> None:
    with server.openai() as client, pytest.raises(openai.BadRequestError, match=message):
        client.chat.completions.create(model="builtin", messages=SAID, extra_body=fields)
