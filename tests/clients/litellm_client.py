"""LiteLLM: chat, a stream, a text, and the errors that it maps."""
# ruff: noqa: PT017

import json
import sys
from importlib.metadata import version

import litellm

URL = sys.argv[1]
server = {"api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
said = [{"role": "user", "content": "Where does the river rise?"}]

answer = litellm.completion("openai/builtin", said, max_tokens=16, user="me", metadata={"a": "b"}, **server)
assert answer.choices[0].message.content and answer.usage.completion_tokens <= 16
parts = list(litellm.completion("openai/builtin", said, max_tokens=16, stream=True, **server))
assert "".join(part.choices[0].delta.content or "" for part in parts)
text = litellm.text_completion(
    model="text-completion-openai/builtin", prompt="The river rises in", max_tokens=8, **server
)
assert text.choices[0].text

form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["deep"],
        "properties": {"deep": {"type": "boolean"}}, "additionalProperties": False}}}  # fmt: skip
made = litellm.completion("openai/builtin", said, response_format=form, max_tokens=99, **server)
assert json.loads(made.choices[0].message.content).keys() == {"deep"}

try:
    litellm.completion("openai/builtin", [{"role": "user", "content": "word " * 3000}], **server)
    raise SystemExit("a long prompt was taken")
except litellm.ContextWindowExceededError as error:
    assert "maximum context length" in str(error)
try:
    litellm.completion("openai/other", said, **server)
    raise SystemExit("another model answered")
except litellm.NotFoundError as error:
    assert "no model" in str(error)

print(json.dumps({"litellm": version("litellm")}))
