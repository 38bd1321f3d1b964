"""Answers have the shapes that OpenAI publishes: its OpenAPI description, and the strict types of its client."""

from __future__ import annotations

import json
from typing import Any

import openai.types as types
import pytest
from jsonschema import Draft202012Validator, ValidationError
from pydantic import BaseModel
from tests.serve import published
from tests.serve.server import Running

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = {"messages": [{"role": "user", "content": "Where does the river rise?"}]}
PROMPT = {"prompt": "The river rises in the mountains and"}
LOSSY = {"sprinter": {"method": "sprinter(tau=0.6)", "tokens": True}}
ASKED: list[dict[str, Any]] = [
    {},
    {"n": 2, "temperature": 0},
    {"stop": ["the"], "max_tokens": 40},
    LOSSY,
]


def valid(found: Any, schema: dict[str, Any], kind: type[BaseModel] | None = None) -> None:
    Draft202012Validator(schema).validate(found)
    if kind is not None:
        kind.model_validate_json(json.dumps(found), strict=True)


def events(answer: Any) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("fields", ASKED, ids=str)
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_answers(server: Running, fields: dict[str, Any], logprobs: bool, chat: bool) -> None:
    path, body = (CHAT, SAID) if chat else (TEXT, PROMPT)
    body = {**body, "max_tokens": 8, "seed": 3, **fields}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    found = server.post(path, body).json()
    schema, kind = (
        (published.CHAT, types.chat.ChatCompletion) if chat else (published.COMPLETION, types.Completion)
    )
    valid(found, schema, kind)
    assert (found["choices"][0]["logprobs"] is not None) == logprobs
    streamed = events(server.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens"):
        assert streamed[-1]["usage"][name] == found["usage"][name]
    for event in streamed:
        valid(
            event,
            published.CHAT_CHUNK if chat else published.COMPLETION_CHUNK,
            # the client's types know no log-probability that is null, and no completion without a reason
            types.chat.ChatCompletionChunk if chat and not (logprobs and fields is LOSSY) else None,
        )


def test_an_echoed_prompt(server: Running) -> None:
    """Its first token has no log-probability, for which the client's types have no place."""
    found = server.post(TEXT, {**PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}).json()
    valid(found, published.COMPLETION)
    assert found["choices"][0]["logprobs"]["token_logprobs"][0] is None


def test_models_and_errors(server: Running) -> None:
    with server.http() as http:
        listed = http.get("/v1/models").json()
        valid(listed, published.MODELS)
        found = http.get(f"/v1/models/{listed['data'][0]['id']}").json()
        valid(found, published.MODEL, types.Model)
        for path in ("/v1/models/another", "/v1/nowhere"):
            valid(http.get(path).json(), published.ERROR)
    for path, body in ((TEXT, {"prompt": ""}), (CHAT, {"messages": []}), (CHAT, {"tools": []}), (TEXT, [1])):
        answer = server.post(path, body)
        assert answer.status_code == 400
        valid(answer.json(), published.ERROR)


def test_the_schemas_refuse_other_shapes(server: Running) -> None:
    found = server.post(CHAT, {**SAID, "max_tokens": 2}).json()
    for wrong in (
        {**found, "object": "text_completion"},
        {name: value for name, value in found.items() if name != "created"},
        {**found, "choices": [{**found["choices"][0], "finish_reason": None}]},
        {**found, "choices": [{**found["choices"][0], "message": {"role": "assistant"}}]},
    ):
        with pytest.raises(ValidationError):
            valid(wrong, published.CHAT)
