"""Structured output: JSON by a schema; what the grammar forces is drafted without a model."""

import json
from typing import Any

import draw

import sprinter

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "legs": {"enum": [2, 4, 8]},
        "flies": {"type": "boolean"},
    },
    "required": ["name", "legs", "flies"],
    "additionalProperties": False,
}
pair = sprinter.load_pair()
schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
prompt = "An animal as JSON: "
shown = {}
for method in ("autoregressive", "speculative(gamma=4)"):
    out = pair.generate(prompt, response_format=schema, method=method, max_new_tokens=100, seed=2)
    animal = json.loads(out.text)
    assert animal.keys() == SCHEMA["properties"].keys()
    title = f"{method}: {out.stats.target_calls} target calls for {len(out.tokens)} tokens"
    shown[title] = [(prompt, ""), *((token.text, token.origin.value) for token in out.tokens)]
draw.texts("structured", shown)
