"""``/v1/completions`` and ``/v1/chat/completions`` through OpenAI's client; texts are those of ``generate``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from tests.serve.server import Running

import sprinter
from sprinter.serve.request_parsing import asked_of
from sprinter.serve.schema import CompletionRequest
from sprinter.serve.settings import ServeSettings

PROMPT = "The river rises in the mountains and"
MESSAGES: list[Any] = [{"role": "user", "content": "Where does the river rise?"}]
LOSSY = {"sprinter": {"method": "sprinter(tau=0.6)"}}


def made(pair: sprinter.Pair, prompt: Any = PROMPT, **options: Any) -> sprinter.Generation:
    out = pair.generate(prompt, **{"max_new_tokens": 12, "seed": 5, **options})
    assert isinstance(out, sprinter.Generation)
    return out


SPECULATIVE = {
    "sprinter": {"method": "speculative"}
}  # drafts of the default depend on how many rows share passes


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as found:
        yield found


# --- completions ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"extra_body": LOSSY}, {"method": "sprinter(tau=0.6)"}),
        ({"extra_body": {"sprinter": {"speculation": False}}}, {"method": "autoregressive"}),
        (
            {"temperature": 0.7, "top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
            {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        ),
        (
            {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {"15": -100}},
            {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {15: -100}},
        ),
        ({"extra_body": {"repetition_penalty": 1.3, "top_k": -1}}, {"repetition_penalty": 1.3}),
        ({"extra_body": {"stop_token_ids": [274, 283]}}, {"stop_token_ids": [274, 283]}),
        ({"stop": ["the", "."]}, {"stop": ["the", "."]}),
    ],
    ids=lambda value: ",".join(value) or "plain",
)
def test_texts_are_those_of_generate(
    client: openai.OpenAI, pair: sprinter.Pair, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    expected = made(pair, **options)
    asked: dict[str, Any] = {"model": "builtin", "prompt": PROMPT, "max_tokens": 12, "seed": 5, **fields}
    raw = client.completions.with_raw_response.create(**asked)
    answer, price = raw.parse(), raw.headers
    (choice,) = answer.choices
    assert choice.text == expected.text
    assert price["x-sprinter-method"] == expected.method and float(price["x-sprinter-tokens-per-s"]) > 0
    assert int(price["x-sprinter-target-calls"]) == expected.stats.target_calls
    assert float(price["x-sprinter-mean-drift"]) == pytest.approx(expected.stats.mean_drift, abs=1e-4)
    assert choice.finish_reason == {"eos": "stop"}.get(expected.finish_reason, expected.finish_reason)
    assert answer.usage is not None and answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    report: Any = choice.model_extra["sprinter"]  # type: ignore[index]
    assert report["method"] == expected.method and report["lossless"] == expected.stats.lossless
    assert report["target_calls"] == expected.stats.target_calls and report["seed"] == 5
    assert report["origins"]["trusted"] == expected.stats.trusted
    assert report["mean_drift"] == pytest.approx(expected.stats.mean_drift, abs=1e-5)
    events = list(client.completions.create(stream=True, **asked))
    assert "".join(event.choices[0].text for event in events) == expected.text
    assert [event.choices[0].finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].choices[0].finish_reason == choice.finish_reason
    assert {event.id for event in events} == {events[0].id} and events[0].object == "text_completion"
    origins = events[-1].model_extra["sprinter"]["origins"]  # type: ignore[index]
    assert origins.keys() == report["origins"].keys() and sum(origins.values()) == len(expected.tokens)


def test_n_and_lists_of_prompts(client: openai.OpenAI, pair: sprinter.Pair) -> None:
    ids = made(pair).prompt_ids
    for prompts in ([PROMPT, "The city lies on"], [ids, ids[:3]]):
        asked: dict[str, Any] = {
            "model": "builtin", "prompt": prompts, "max_tokens": 6, "seed": 5, "n": 2, "extra_body": SPECULATIVE,
        }  # fmt: skip
        answer = client.completions.create(**asked)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        options = {"method": "speculative", "max_new_tokens": 6}
        expected = [made(pair, prompt, seed=seed, **options) for prompt in prompts for seed in (5, 6)]
        assert [choice.text for choice in answer.choices] == [out.text for out in expected]
        assert answer.usage is not None and answer.usage.completion_tokens == 24
        assert answer.usage.prompt_tokens == sum(out.prompt_tokens for out in expected[::2])
        texts = [""] * 4
        for event in client.completions.create(stream=True, **asked):
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == [out.text for out in expected]


@pytest.mark.parametrize("seed", [{}, {"seed": -1}])
def test_without_a_seed_texts_differ_and_the_seed_is_told(
    server: Running, pair: sprinter.Pair, seed: dict[str, int]
) -> None:
    """-1 is none, as llama.cpp's clients write it."""
    body = {"prompt": PROMPT, "max_tokens": 24, "sprinter": {"method": "auto"}, **seed}
    first, second = (server.post("/v1/completions", body).json()["choices"][0] for _ in range(2))
    assert first["text"] != second["text"]
    names = ("method", "seed", "switches", "copy_switches", "rules")
    body["temperature"] = 0  # now the rules of auto begin with what they learned in the text before
    greedy = [server.post("/v1/completions", body).json()["choices"][0] for _ in range(2)]
    for one in (first, second, *greedy):
        told = {name: one["sprinter"][name] for name in names}
        law = {"temperature": 0.0} if one in greedy else {}
        assert made(pair, max_new_tokens=24, **told, **law).text == one["text"]
    assert greedy[1]["sprinter"]["rules"] is not None and second["sprinter"]["rules"] is None


# --- log-probabilities ------------------------------------------------------------------------------------------------
def law_after(pair: sprinter.Pair, ids: list[int]) -> torch.Tensor:
    """ln p of the next token after each token, from the uncached target."""
    with torch.inference_mode():
        logits = pair.models.target.model(torch.tensor([ids])).logits[0]  # type: ignore[operator,union-attr]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize("most", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False])
def test_echo_scores_the_prompt_as_lm_evaluation_harness_asks(
    server: Running, pair: sprinter.Pair, most: int, as_ids: bool
) -> None:
    ids = made(pair).prompt_ids
    body = {
        "model": "builtin", "prompt": [ids] if as_ids else PROMPT, "temperature": 0, "max_tokens": most,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    found, law = choice["logprobs"], law_after(pair, ids)
    assert choice["text"].startswith(PROMPT) and choice["finish_reason"] == "length"
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(ids) + most
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    own = [law[i, ids[i + 1]].item() for i in range(len(ids) - 1)]
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
    for i, top in enumerate(found["top_logprobs"][1 : len(ids)]):
        assert max(top.values()) == pytest.approx(law[i].max().item(), abs=1e-4)
        greedy = max(top.values()) == found["token_logprobs"][i + 1]
        assert greedy == (law[i].argmax().item() == ids[i + 1])
    assert [PROMPT[at:][:1] for at in found["text_offset"][:2]] == ["T", " "]
    if most:
        assert found["token_logprobs"][-1] == pytest.approx(law[-1].max().item(), abs=1e-4)
    with server.http() as http:
        events = sse(http.post("/v1/completions", json=body | {"stream": True}).text)
    assert events[0]["choices"][0]["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(ids)]
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]


@pytest.mark.parametrize("method", ["speculative(gamma=4)", "sprinter(tau=0.6)"])
def test_logprobs_are_those_of_the_target(client: openai.OpenAI, pair: sprinter.Pair, method: str) -> None:
    out = made(pair, method=method, logprobs=2, meter="complete", temperature=0.5, seed=7)
    law = law_after(pair, out.prompt_ids + [token.id for token in out.tokens])[out.prompt_tokens - 1 :]
    raw = [law[i, token.id].item() for i, token in enumerate(out.tokens)]
    asked: Any = {
        "max_tokens": 12,
        "seed": 7,
        "temperature": 0.5,
        "extra_body": {"sprinter": {"method": method}},
    }
    answer = client.completions.create(model="builtin", prompt=PROMPT, logprobs=2, **asked)
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs == pytest.approx(raw, abs=1e-4)
    chat = client.chat.completions.create(
        model="builtin", messages=MESSAGES, logprobs=True, top_logprobs=3, **asked
    )
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    for token in chat.choices[0].logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= token.top_logprobs[0].logprob + 1e-6
        assert token.bytes is None or bytes(token.bytes).decode() == token.token


# --- chat -------------------------------------------------------------------------------------------------------------
def test_chat_is_that_of_generate(client: openai.OpenAI, pair: sprinter.Pair) -> None:
    expected = made(pair, MESSAGES, method="speculative(gamma=3)")
    asked: Any = {
        "model": "builtin", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 5,
        "extra_body": {"sprinter": {"method": "speculative(gamma=3)"}},
    }  # fmt: skip
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant" and answer.object == "chat.completion"
    events = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == expected.text
    assert events[-1].choices == [] and events[-1].usage is not None
    assert events[-1].usage.total_tokens == expected.prompt_tokens + 12
    speculation: Any = events[-1].model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert speculation["num_spec_steps"] == expected.stats.target_calls
    assert speculation == answer.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]


def test_chat_goes_on_to_the_end_of_the_row(server: Running) -> None:
    body = {"messages": MESSAGES, "seed": 1, "temperature": 0, "logit_bias": {"0": -100}}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["usage"]["total_tokens"] == 256


@pytest.mark.parametrize("streams", [True, False])
def test_answers_have_the_shapes_of_openais_types(server: Running, streams: bool) -> None:
    texts = {"prompt": PROMPT, "logprobs": 2, "n": 2}
    chats = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    usage = {"stream_options": {"include_usage": True}} if streams else {}
    more = {"max_tokens": 6, "seed": 5, "stream": streams, **usage}
    with server.http() as http:
        text, chat = (
            http.post(path, json=body | more).text
            for path, body in (("/v1/completions", texts), ("/v1/chat/completions", chats))
        )
    if not streams:
        openai.types.Completion.model_validate_json(text, strict=True)
        openai.types.chat.ChatCompletion.model_validate_json(chat, strict=True)
        return
    for event in sse(chat):
        openai.types.chat.ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
    for event in sse(text):
        for choice in event["choices"]:
            choice["finish_reason"] = (
                choice["finish_reason"] or "stop"
            )  # null before the end, as OpenAI's own
        openai.types.Completion.model_validate_json(json.dumps(event), strict=True)


# --- what speculation did ---------------------------------------------------------------------------------------------
def test_a_budget_is_a_field_of_a_request(server: Running, pair: sprinter.Pair) -> None:
    out = pair.generate(PROMPT, method="sprinter", budget=0.1, max_new_tokens=40, seed=5)
    ours = {"method": "sprinter", "budget": 0.1}
    answer = server.post(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 40, "seed": 5, "sprinter": ours}
    ).json()
    assert answer["choices"][0]["text"] == out.text
    report = json.dumps(answer)
    assert "budget=0.1" in report and '"budget": 0.1' in report and '"budget_left"' in report


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, None),
        ({"seed": 5}, None),
        ({"sprinter": {"method": "speculative"}}, None),
        ({"sprinter": {"method": "speculative", "never_slower": True}}, True),
        ({"seed": 5, "sprinter": {"never_slower": True}}, True),
        ({"sprinter": {"never_slower": False}}, False),
    ],
)
def test_drafting_may_stop_as_in_python(more: dict[str, Any], expected: bool | None) -> None:
    """None: where neither the request nor the server names a method, and with auto."""
    body = CompletionRequest.model_validate({"prompt": PROMPT, **more})
    assert asked_of(body, ServeSettings()).options.never_slower is expected
    auto = asked_of(body, ServeSettings(method="auto")).options.never_slower
    assert auto == more.get("sprinter", {}).get("never_slower")  # None: auto's own default
    never = asked_of(body, ServeSettings(never_slower=False)).options.never_slower
    assert bool(never) is bool(more.get("sprinter", {}).get("never_slower"))


@pytest.mark.parametrize(
    "method", ["speculative(gamma=4)", "sprinter(tau=0.6)", "autoregressive", "draft-only"]
)
def test_both_shapes_count_as_the_engine_does(server: Running, pair: sprinter.Pair, method: str) -> None:
    out = made(pair, method=method, max_new_tokens=40)
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 5, "sprinter": {"method": method}}
    answer = server.post("/v1/completions", body).json()
    vllm, timings = answer["metrics"]["speculative_decoding"], answer["timings"]
    stats = out.stats
    assert vllm["num_spec_steps"] == sum(vllm["acceptance_histogram"]) == stats.target_calls
    kept = sum(j * count for j, count in enumerate(vllm["acceptance_histogram"]))
    assert kept == vllm["num_accepted_draft_tokens"] <= stats.trusted + stats.accepted
    assert len(vllm["acceptance_histogram"]) == vllm["num_spec_tokens"] + 1
    if stats.target_calls:
        added = round(vllm["mean_acceptance_length"] * stats.target_calls)
        assert stats.target_calls + kept - added in (0, 1), "behind the last draft token there may be none"
    assert timings["draft_n"] == vllm["num_draft_tokens"] == stats.drafted
    assert timings["draft_n_accepted"] == stats.trusted + stats.accepted
    assert timings["target_calls"] == stats.target_calls and timings["predicted_n"] == stats.new_tokens
    if method == "speculative(gamma=4)":
        assert vllm["num_spec_tokens"] == 4 and kept == stats.accepted
        # every round adds its kept tokens and one of the target, but for the last one, which may be cut short
        assert 0 <= stats.target_calls + kept - stats.new_tokens <= 1


def sse(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_of_a_stream_tell_where_they_come_from(
    server: Running, pair: sprinter.Pair, path: str
) -> None:
    prompt: Any = PROMPT if path == "/v1/completions" else MESSAGES
    out = made(pair, prompt, method="sprinter(tau=0.3)", max_new_tokens=40, logprobs=0)
    body = {
        ("prompt" if path == "/v1/completions" else "messages"): prompt, "max_tokens": 40, "seed": 5, "stream": True,
        "sprinter": {"method": "sprinter(tau=0.3)", "tokens": True},
    }  # fmt: skip
    with server.http() as http:
        events = sse(http.post(path, json=body).text)
    told: dict[int, dict[str, Any]] = {}
    late = 0
    for event in events:
        report = event.get("sprinter", {})
        for token in report.get("tokens", []):
            assert token["index"] == len(told)
            told[token["index"]] = token
        for token in report.get("scored", []):
            assert told[token["index"]]["drift"] is None and token["logprob"] is not None
            told[token["index"]] = token
            late += 1
    assert [token["id"] for token in told.values()] == [token.id for token in out.tokens]
    for i, expected in enumerate(out.tokens):
        token = told[i]
        assert (token["origin"], token["round"], token["text"]) == (
            expected.origin.value, expected.round, expected.text,
        )  # fmt: skip
        assert token["drift"] == pytest.approx(expected.drift, abs=1e-4)
        assert token["logprob"] == pytest.approx(expected.logprob, abs=1e-3)
        assert token["gate_score"] == pytest.approx(expected.gate_score, abs=1e-4)
        assert (token["gate_score"] is None) == (token["origin"] not in ("trusted", "accepted"))
        assert token["origin"] != "trusted" or token["gate_score"] >= 0.3
        assert token["draft_logprob"] == pytest.approx(expected.draft_logprob, abs=1e-3)
    last = events[-1]["sprinter"]
    assert late > 0 and last["coverage"] == pytest.approx(out.stats.drift_coverage)
    assert sum(last["origins"].values()) == 40 and last["lossless"] is False
    assert math.isclose(last["mean_drift"], out.stats.mean_drift or 0.0, abs_tol=1e-4)
    assert "timings" in events[-1] and "metrics" in events[-1]


# --- the model and its tokens -----------------------------------------------------------------------------------------
def test_models(client: openai.OpenAI, server: Running) -> None:
    (model,) = client.models.list().data
    assert model.id == "builtin" and client.models.retrieve("builtin").id == "builtin"
    assert model.model_extra["max_model_len"] == 256  # type: ignore[index]
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")


def test_tokenize_and_back(server: Running, pair: sprinter.Pair) -> None:
    ids = made(pair).prompt_ids
    told = server.post("/tokenize", {"prompt": PROMPT}).json()
    assert told == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": PROMPT}
    rendered = pair.render_chat(MESSAGES)
    assert server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"] == rendered.ids
    with server.http() as http:
        about = http.get("/tokenizer_info").json()
    assert about["eos_token"] and about["chat_template"]
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400
