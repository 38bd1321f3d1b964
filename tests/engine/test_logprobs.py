"""Log-probabilities of tokens: those of plain forward passes of both models, by every method."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sprinter
from sprinter.decode import Lookup, Method, Model, Svip
from sprinter.decode.draft import Origin, TopToken
from sprinter.decode.spec import METHODS, parse_method

PROMPT = [3, 1, 4, 1, 5, 3, 1]
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.8, "top_k": 9, "logprobs": 3}
NAMES = [
    name
    for name in METHODS.names()
    if parse_method(name).heads <= {"gate"} and not parse_method(name).drafter.by_heads
]


def log_laws(model: Any, out: sprinter.Generation) -> Tensor:
    """ln of the raw law of each new token, ``[n, V]``, from one forward pass without a cache."""
    text = [*out.prompt_ids, *(token.id for token in out.tokens)]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].double()
    return torch.log_softmax(logits, -1)[len(out.prompt_ids) - 1 : -1]


def close(a: float | None, b: Tensor) -> bool:
    return a is not None and math.isclose(a, float(b), abs_tol=2e-4)


def check_p(out: sprinter.Generation, laws: Tensor, k: int) -> int:
    """Check all log-probabilities of the target that are known; returns their number."""
    known = [(token, law) for token, law in zip(out.tokens, laws, strict=True) if token.logprob is not None]
    for token, law in known:
        assert close(token.logprob, law[token.id])
        assert token.top_logprobs is not None and len(token.top_logprobs) == k
        assert all(close(one.logprob, law[one.id]) for one in token.top_logprobs)
        best = law.topk(k).values if k else []
        assert all(close(one.logprob, value) for one, value in zip(token.top_logprobs, best, strict=True))
    assert all(token.top_logprobs is None for token in out.tokens if token.logprob is None)
    return len(known)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_tells_what_a_plain_pass_tells(tiny_pair: sprinter.Pair, name: str) -> None:
    out = tiny_pair.generate(PROMPT, method=name, meter="complete", repetition_penalty=1.3, seed=2, **OPTIONS)
    p, q = (log_laws(one.model, out) for one in (tiny_pair.models.target, tiny_pair.models.draft) if one)
    assert check_p(out, p, 3) == len(out.tokens)
    drafted = [token.origin not in (Origin.BONUS, Origin.TARGET) for token in out.tokens]
    drafter = parse_method(name).drafter
    for token, law, known in zip(out.tokens, q, drafted, strict=True):
        if drafter.proposer is not None and drafter.uses_model and known:  # copied, or drafted by the model
            assert token.draft_logprob is None or close(token.draft_logprob, law[token.id])
        elif drafter.proposer is None and known:
            assert close(token.draft_logprob, law[token.id])
        else:
            assert token.draft_logprob is None
    text = tiny_pair.generate(
        PROMPT, method=name, repetition_penalty=1.3, seed=2, **{**OPTIONS, "logprobs": None}
    )
    assert [token.id for token in text.tokens] == [token.id for token in out.tokens]
    assert all(token.logprob is token.draft_logprob is token.top_logprobs is None for token in text.tokens)
    assert text.to_dict()["logprobs"] is None


def test_trusted_tokens_that_no_target_call_scored_are_unknown(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, method="sprinter(tau=0.0, cap=6)", **OPTIONS)
    known = check_p(out, log_laws(tiny_pair.models.target.model, out), 3)
    assert 0 < known < len(out.tokens)
    assert [token.logprob is None for token in out.tokens] == [token.drift is None for token in out.tokens]
    alone = tiny_pair.generate(PROMPT, method="draft-only", **OPTIONS)
    assert all(token.logprob is None and token.draft_logprob is not None for token in alone.tokens)


def test_texts_of_a_batch_and_steps_ahead_have_the_same(tiny_pair: sprinter.Pair) -> None:
    looks = Method(drafter=Lookup(n=2, otherwise=Model()), stop=Svip(2.0))
    methods = ["sprinter(tau=0.5)", "svip(h=2.0)", "batch(drafts=2, gamma=3)", looks]
    singles = [tiny_pair.generate(PROMPT, method=method, **OPTIONS) for method in methods]
    rows = tiny_pair.generate([PROMPT] * 4, method=methods, ahead=4, **OPTIONS)
    for one, other in zip(singles, rows, strict=True):
        pairs = list(zip(one.tokens, other.tokens, strict=True))
        assert all(a.id == b.id for a, b in pairs)
        for name in ("logprob", "draft_logprob"):
            values = [(getattr(a, name), getattr(b, name)) for a, b in pairs]
            assert all(a == b if a is None or b is None else close(a, torch.tensor(b)) for a, b in values)


def test_a_stream_fills_them_in_when_the_target_has_scored_a_token(tiny_pair: sprinter.Pair) -> None:
    stream = tiny_pair.stream(PROMPT, method="sprinter(tau=0.0, cap=6)", **OPTIONS)
    first = next(stream)
    assert first.origin is Origin.TRUSTED and first.draft_logprob is not None and first.logprob is None
    out = stream.finish()
    assert first.logprob is not None and first.logprob == out.tokens[0].logprob


def test_json(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, method="speculative", max_new_tokens=3, logprobs=1, temperature=0)
    found = json.loads(json.dumps(out.to_dict(), allow_nan=False))["logprobs"]
    token = out.tokens[0]
    assert len(found) == 3 and token.top_logprobs == [TopToken(token.id, token.logprob)]  # type: ignore[arg-type]
    assert found[0] == {
        "logprob": token.logprob, "draft_logprob": token.draft_logprob,
        "top": [{"id": token.id, "logprob": token.logprob}],
    }  # fmt: skip
    assert tiny_pair.generate(PROMPT, max_new_tokens=2, logprobs=0).tokens[0].top_logprobs == []
