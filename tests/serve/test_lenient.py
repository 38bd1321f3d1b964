"""What clients send and do not need is accepted; what asks for something is done, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.server import TEMPLATE, Running, serving

import sprinter
from sprinter.serve.conversations import readable_messages

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
PROMPT = "The river rises in the mountains and"
SAID: list[Any] = [{"role": "user", "content": "Where does the river rise?"}]
FIXED: dict[str, Any] = {"seed": 5, "max_tokens": 12, "sprinter": {"method": "speculative"}}
LABELS: dict[str, Any] = {
    "user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "y", "response_format": {"type": "text"}, "skip_special_tokens": True, "ignore_eos": False,
    "min_tokens": 0, "include_stop_str_in_output": False, "spaces_between_special_tokens": True,
}  # fmt: skip


def text_of(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, FIXED | body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_fields_that_ask_for_nothing_change_nothing(server: Running) -> None:
    plain, labelled = (text_of(server, TEXT, prompt=PROMPT, **more) for more in ({}, LABELS | {"best_of": 1}))
    assert plain["choices"][0]["text"] == labelled["choices"][0]["text"] != ""
    more = {
        "tool_choice": "none", "parallel_tool_calls": True, "modalities": ["text"], "reasoning_effort": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "max_completion_tokens": 12,
        "logprobs": False, "top_logprobs": 0,
    }  # fmt: skip
    said = [{"role": "developer", "content": "Be brief."}, *SAID]
    named = [{"role": "system", "content": "Be brief."}, {**SAID[0], "name": "me", "type": "text"}]
    plain, labelled = (
        text_of(server, CHAT, messages=said),
        text_of(server, CHAT, messages=named, **LABELS, **more),
    )
    assert plain["choices"][0]["message"] == labelled["choices"][0]["message"]
    assert plain["usage"] == labelled["usage"]


def test_messages_have_the_fields_that_the_template_reads(pair: sprinter.Pair) -> None:
    assert pair.tokenizer is not None
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    answered = {"role": "assistant", "content": "", "tool_calls": [call], "refusal": None, "annotations": []}
    (found,) = readable_messages([answered], pair.tokenizer)
    function = {"name": "f", "arguments": {"a": 1}}
    assert found == {"role": "assistant", "tool_calls": [{**call, "function": function}]}
    broken = {**call, "function": {"name": "f", "arguments": "{"}}
    assert readable_messages([{**answered, "tool_calls": [broken]}], pair.tokenizer)[0]["tool_calls"] == [
        broken
    ]
    pair.tokenizer.chat_template = "{% for message in messages %}{{ message.name }} developer{% endfor %}"
    try:
        told = {"role": "developer", "name": "x", "content": "y"}
        assert readable_messages([told], pair.tokenizer) == [told]
    finally:
        pair.tokenizer.chat_template = TEMPLATE


def test_a_text_ends_with_the_row_and_is_not_refused(server: Running) -> None:
    long = "word " * 220
    found = text_of(server, TEXT, prompt=long, max_tokens=10_000, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 256 and found["choices"][0]["finish_reason"] == "length"
    found = text_of(server, TEXT, prompt=[long, long + "A"], max_tokens=10_000, ignore_eos=True)
    assert found["usage"]["total_tokens"] == 512


LONG = "word " * 300
TOO_LONG: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"text of {n}": (TEXT, {"prompt": "word " * n}) for n in (255, 300, 30_000)},
    **{f"chat of {n}": (CHAT, {"messages": [{**SAID[0], "content": "word " * n}]}) for n in (255, 300, 30_000)},
    "ids": (TEXT, {"prompt": [5] * 256}), "many ids": (TEXT, {"prompt": [5] * 30_000}),
    "texts": (TEXT, {"prompt": [PROMPT, LONG]}), "lists of ids": (TEXT, {"prompt": [[5], [5] * 300]}),
    "echo": (TEXT, {"prompt": LONG, "echo": True}), "echo alone": (TEXT, {"prompt": LONG, "echo": True, "logprobs": 1,
                                                                        "max_tokens": 0}),
    "stream": (TEXT, {"prompt": LONG, "stream": True}), "input": (RESPONSES, {"input": LONG}),
    "messages": (RESPONSES, {"input": [{**SAID[0], "content": LONG}]}),
    "instructions": (RESPONSES, {"input": PROMPT, "instructions": LONG}),
    "streamed input": (RESPONSES, {"input": LONG, "stream": True}),
}  # fmt: skip


def says_too_long(answer: Any) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["code"], error["type"]) == (
        400, "context_length_exceeded", "invalid_request_error"
    ) and "maximum context length is 256" in error["message"]  # fmt: skip


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_long_prompt_is_refused_in_the_words_that_clients_know(server: Running, kind: str) -> None:
    path, body = TOO_LONG[kind]
    limit = {"max_output_tokens": 1} if path == RESPONSES else {"max_tokens": 1}
    answer = server.post(path, {"seed": 5, **limit, **body})
    assert says_too_long(answer), answer.text


def test_more_messages_than_tokens_are_not_rendered(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.serve.service.encode_prompt", lambda *_, **__: 1 / 0)
    said = [{"role": "user", "content": ""}] * 257
    for path, more in ((CHAT, {"max_tokens": 1}), ("/tokenize", {})):
        told = server.post(path, {"messages": said, **more})
        assert told.status_code == 400 and told.json()["error"]["code"] == "context_length_exceeded"


def test_eos_is_ignored_and_forbidden_on_request(server: Running, pair: sprinter.Pair) -> None:
    ends = {"logit_bias": {str(pair.models.target.eos_ids[0]): 100}, "max_tokens": 9}
    assert text_of(server, TEXT, prompt=PROMPT, **ends)["usage"]["completion_tokens"] == 1
    ignored = text_of(server, TEXT, prompt=PROMPT, ignore_eos=True, **ends)
    assert ignored["usage"]["completion_tokens"] == 9 and ignored["choices"][0]["text"] == ""
    assert ignored["choices"][0]["finish_reason"] == "length"
    least = text_of(server, TEXT, prompt=PROMPT, min_tokens=4, **ends)
    assert least["usage"]["completion_tokens"] == 5 and least["choices"][0]["finish_reason"] == "stop"
    stopped = text_of(server, TEXT, prompt=PROMPT, ignore_eos=True, stop_token_ids=[15], max_tokens=9,
                      logit_bias={"15": 100})  # fmt: skip
    assert stopped["usage"]["completion_tokens"] == 1


def test_usage_is_in_every_event_on_request(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    with server.openai() as client:
        events = list(client.completions.create(model="builtin", prompt=PROMPT, max_tokens=6, stream=True, seed=5,
                                                stream_options=options))  # type: ignore[call-overload]  # fmt: skip
    counts = [event.usage.completion_tokens for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 6
    assert {event.usage.prompt_tokens for event in events} == {events[-1].usage.prompt_tokens}


@pytest.fixture(scope="module")
def filling(pair: sprinter.Pair) -> Iterator[Running]:
    """A server under several names, whose tokenizer has the tokens of Qwen-Coder in place of three others."""
    with serving(pair, aliases=("gpt-4o", "org/other")) as found:
        yield found


def test_a_model_has_several_names(filling: Running) -> None:
    with filling.openai() as client:
        assert [one.id for one in client.models.list()] == ["builtin", "gpt-4o", "org/other"]
        assert client.models.retrieve("org/other").id == "org/other"
        answer = client.completions.create(model="gpt-4o", prompt=PROMPT, max_tokens=1)
    assert answer.model == "gpt-4o"
    assert (
        filling.post(TEXT, {"prompt": PROMPT, "model": "gpt-5"}).json()["error"]["code"] == "model_not_found"
    )


def test_a_suffix_is_read_before_the_text(
    filling: Running, pair: sprinter.Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**pair.tokenizer.get_vocab(), "<|fim_prefix|>": 7, "<|fim_suffix|>": 8, "<|fim_middle|>": 9}  # type: ignore[union-attr]
    monkeypatch.setattr(type(pair.tokenizer), "get_vocab", lambda self: known)
    before, behind = ([*pair.tokenizer(text)["input_ids"]] for text in (PROMPT, " the sea."))  # type: ignore[misc]
    found = text_of(filling, TEXT, prompt=PROMPT, suffix=" the sea.")
    expected = pair.generate(
        [7, *before, 8, *behind, 9], max_new_tokens=12, seed=5, method="speculative", stop_token_ids=[7, 8, 9]
    )
    assert found["choices"][0]["text"] == expected.text
    assert found["usage"]["prompt_tokens"] == len(before) + len(behind) + 3
    for long in ({"suffix": LONG}, {"prompt": LONG}):
        assert says_too_long(filling.post(TEXT, FIXED | {"prompt": PROMPT, "suffix": " the sea."} | long))
    echoed = filling.post(TEXT, FIXED | {"prompt": PROMPT, "suffix": "x", "echo": True})
    assert echoed.status_code == 400 and "exclude each other" in echoed.json()["error"]["message"]


def test_special_tokens_are_written_out_on_request(server: Running, pair: sprinter.Pair) -> None:
    eos = pair.models.target.eos_ids[0]
    asked: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": 3,
        "ignore_eos": True,
        "logit_bias": {str(eos): 100},
    }
    assert (
        text_of(server, TEXT, **asked, skip_special_tokens=False)["choices"][0]["text"] == ""
    )  # it ends texts


def test_embeddings_are_refused_in_one_line(server: Running) -> None:
    answer = server.post("/v1/embeddings", {"input": "x", "model": "builtin"})
    assert answer.status_code == 400 and "has no embeddings" in answer.json()["error"]["message"]
