"""openai-python: chat, streams, parsed answers, tools."""
# ruff: noqa: PT017

import json
import sys
from typing import Literal

import openai
import pydantic

URL = sys.argv[1]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
said = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Where does the river rise?"},
]
labels = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "max_completion_tokens": 24,
}
tool = {
    "type": "function",
    "function": {
        "name": "weather", "strict": True,
        "parameters": {"type": "object", "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 9}},
                       "required": ["days"], "additionalProperties": False},
    },
}  # fmt: skip

answer = client.chat.completions.create(model=model, messages=said, **labels)
assert answer.choices[0].message.content and answer.usage.completion_tokens <= 24
assert answer.choices[0].finish_reason in ("stop", "length")

streamed = client.chat.completions.create(
    model=model, messages=said, stream=True, stream_options={"include_usage": True}, seed=1, **labels
)
events = list(streamed)
assert "".join(event.choices[0].delta.content or "" for event in events if event.choices)
assert events[-1].usage.completion_tokens > 0


class River(pydantic.BaseModel):
    deep: bool
    kind: Literal["lake", "spring"]


parsed = client.chat.completions.parse(model=model, messages=said, response_format=River, seed=1)
assert isinstance(parsed.choices[0].message.parsed, River)
with client.chat.completions.stream(model=model, messages=said, response_format=River, seed=1) as stream:
    kinds = {event.type for event in stream}
    assert "content.delta" in kinds and stream.get_final_completion().choices[0].message.parsed.kind

client.chat.completions.create(model=model, messages=said, tools=[tool], tool_choice="auto", **labels)
for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
    called = client.chat.completions.create(model=model, messages=said, tools=[tool], tool_choice=choice, max_tokens=99,
                                            parallel_tool_calls=False)  # fmt: skip
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["days"] <= 9
    told = [*said, called.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=model, messages=told, **labels).choices

whole = client.responses.create(
    model=model, input="Where?", instructions="Be brief.", max_output_tokens=12, store=False
)
assert whole.output_text and whole.usage.output_tokens <= 12
with client.responses.stream(model=model, input="Where?", text_format=River) as stream:
    kinds = [event.type for event in stream]
    assert "response.output_text.delta" in kinds and stream.get_final_response().output_parsed.kind
assert client.responses.parse(model=model, input="Where?", text_format=River).output_parsed.kind

text = client.completions.create(model=model, prompt="The river rises in", max_tokens=8, best_of=1, user="me")
assert text.choices[0].text

try:
    client.completions.create(model=model, prompt="word " * 3000)
    raise SystemExit("a long prompt was taken")
except openai.BadRequestError as error:
    assert error.code == "context_length_exceeded" and "maximum context length" in error.message
try:
    client.embeddings.create(model=model, input="x")
    raise SystemExit("embeddings were made")
except openai.BadRequestError as error:
    assert "no embeddings" in error.message

print(json.dumps({"openai": openai.__version__}))
