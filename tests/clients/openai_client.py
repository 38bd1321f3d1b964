"""openai-python: chat, streams, parsed answers, tools."""
# ruff: noqa: PT017

import json
import sys

import openai

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
        "parameters": {"type": "object", "properties": {"days": {"type": "integer", "maximum": 9}},
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

with client.chat.completions.stream(model=model, messages=said, **labels) as stream:
    kinds = {event.type for event in stream}
    assert "content.delta" in kinds and stream.get_final_completion().choices[0].message.content

auto = client.chat.completions.create(model=model, messages=said, tools=[tool], tool_choice="auto", **labels)
assert auto.choices[0].message.tool_calls is None or auto.choices[0].message.tool_calls

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
