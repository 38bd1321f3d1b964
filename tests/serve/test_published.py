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
    {"stop": ["the"], "max_tokens": 40, "temperature": 0},
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


# --- our own description --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"temperature": 1}, {"temperature": 1e31}),
        ({"top_p": 0.5}, {"top_p": 0}),
        ({"top_k": -1}, {"top_k": -2}),
        ({"min_p": 0.1}, {"min_p": 1.5}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"frequency_penalty": 2.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 0}),
        ({"logit_bias": {"7": -100}}, {"logit_bias": {"7": 101}}),
        ({"n": 2}, {"n": 0}),
        ({"stop": ["a"]}, {"stop": [""]}),
        ({"sprinter": {"method": "sprinter", "budget": 0.1}}, {"sprinter": {"budget": 2}}),
        ({"seed": 2**40}, {"best": 2}),
        ({"temperature": None, "sprinter": {"tokens": None}, "suffix": None}, {"prompt": None}),
    ],
    ids=str,
)
def test_the_description_says_what_is_valid(
    server: Running, fields: dict[str, Any], wrong: dict[str, Any]
) -> None:
    with server.http() as http:
        described = http.get("/openapi.json").json()
    body = Draft202012Validator(
        {"$ref": "#/components/schemas/CompletionRequest", "components": described["components"]}
    )
    for given, status in ((fields, 200), (wrong, 400)):
        asked = {**PROMPT, "max_tokens": 1, **given}
        assert body.is_valid(asked) == (status == 200)
        assert server.post(TEXT, asked).status_code == status


def test_the_description_says_how_requests_are_refused(server: Running) -> None:
    with server.http() as http:
        described = http.get("/openapi.json").json()
        assert {TEXT, CHAT, "/v1/models", "/health", "/metrics", "/tokenize"} <= described["paths"].keys()
        for path, operations in described["paths"].items():
            for found in operations.values():
                assert "422" not in found["responses"]
                refused = found["responses"]["4XX"]["content"]
                assert refused == {
                    "application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}
                }
                served = found["responses"]["200"]["content"]
                assert ("text/event-stream" in served) == (path in (TEXT, CHAT, "/v1/responses"))
        kind = described["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
        assert [*kind] == ["text/plain"]
        assert http.get("/metrics").headers["content-type"].startswith("text/plain")
    refusal = Draft202012Validator(
        {"$ref": "#/components/schemas/ErrorAnswer", "components": described["components"]}
    )
    for given in ({"prompt": ""}, {"best_of": 2}, {"model": "another"}):
        refusal.validate(server.post(TEXT, {**PROMPT, **given}).json())
        assert not refusal.is_valid({"error": "no"})
