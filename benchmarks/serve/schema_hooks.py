"""Hooks for schemathesis, which runs them in its own Python: most valid bodies are made such that the server generates.

The description of a request cannot say which methods there are, how long a row is or which fields go together; of the
bodies that schemathesis makes from it alone nearly all are refused. Three in four valid bodies are therefore changed:
known methods, few and short texts, token ids of the vocabulary. The others, and all invalid ones, are sent as they are.
"""

from __future__ import annotations

import json
import random
from typing import Any

import schemathesis

METHODS = (
    "exact", "autoregressive", "speculative(gamma=3)", "sprinter(tau=0.5)", "draft-only", "svip(h=0.5)",
    "certain(threshold=0.5)", "lookup(n=2, gamma=4)", "typical(gamma=3)", "specinfer(drafts=2, gamma=3)", "adaedl",
    "block(gamma=4)", "fuzzy(gamma=3)",
)  # fmt: skip
VOCABULARY = 256
"""Token ids that every tokenizer of the built-in pair's size has."""


def _changed(path: str, body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A body that differs from the given one in what the server would refuse."""
    body = {name: value for name, value in body.items() if name != "model"}
    if path == "/detokenize":
        return {"tokens": _ids(body.get("tokens"))}
    if path == "/tokenize":
        kept = {name: value for name, value in body.items() if name != "messages"}
        return kept if kept.get("prompt") is not None else kept | {"prompt": "The river"}
    body["max_tokens"] = chance.randint(1, 12)
    body.pop("max_completion_tokens", None)
    if body.get("n") is not None:
        body["n"] = 1 + body["n"] % 3
    if body.get("logit_bias") is not None:
        values = [value for value in body["logit_bias"].values() if value is not None]
        body["logit_bias"] = {str(i): value for i, value in enumerate(values)}
    if body.get("stop_token_ids") is not None:
        body["stop_token_ids"] = _ids(body["stop_token_ids"])
    if not body.get("stream"):
        body.pop("stream_options", None)
    if path == "/v1/chat/completions":
        if not body.get("logprobs"):
            body.pop("top_logprobs", None)
        said = [str(message)[:40] for message in body["messages"]][:3]
        body["messages"] = [{"role": "system", "content": text} for text in said[:-1]]
        body["messages"].append({"role": "user", "content": said[-1]})
    else:
        body["prompt"] = _prompt(body.get("prompt"))
    ours = body.get("sprinter") or ({} if chance.random() < 0.6 else None)
    if isinstance(ours, dict):
        ours = {name: value for name, value in ours.items() if name not in ("method", "budget")}
        if ours.get("speculation", True) and not ours.get("require_lossless"):
            ours["method"] = chance.choice(METHODS)
        body["sprinter"] = ours
    return body


def _prompt(given: Any) -> Any:
    if isinstance(given, str):
        return given[:100] or "A"
    if not isinstance(given, list) or not given:
        return "The river rises in"
    if isinstance(given[0], str):
        return [str(one)[:100] or "A" for one in given[:3]]
    if isinstance(given[0], list):
        return [_ids(one) or [1] for one in given[:3]]
    return _ids(given)


def _ids(given: Any) -> list[int]:
    found = given if isinstance(given, list) else []
    return [int(one) % VOCABULARY for one in found if isinstance(one, int | float)][:40]


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    """Change most of the valid bodies."""
    body = case.body
    if case.meta is None or not case.meta.generation.mode.is_positive or not isinstance(body, dict):
        return
    chance = random.Random(json.dumps(body, sort_keys=True, default=str))
    if chance.random() < 0.75:
        case.body = _changed(case.operation.path, body, chance)
