"""Names and bytes of tokens in answers, and where tokens are in the text: spaces, parts of characters, namesakes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.server import Running, builtin_pair, serving
from tests.spellings import BYTES, KINDS, SIZE, ids_of

import sprinter
from sprinter.decode.draft import TopToken
from sprinter.engine.prompt import EncodedPrompt
from sprinter.serve.logprobs import LawfulToken, TokenNames, completion_logprobs, of_prompt

TOKENIZERS = {name: make() for name, make in KINDS.items()}
LLAMA = TOKENIZERS["llama2"]


@pytest.mark.parametrize("name", KINDS)
def test_every_token_has_a_name_of_its_own(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    names = TokenNames(tokenizer)
    found = [names.name(id) for id in range(SIZE + 8)]
    assert len(set(found)) == len(found)
    assert found[SIZE] == f"token_id:{SIZE}" and names.bytes_of(SIZE) == b""
    assert found[0] == "<unk>" and names.bytes_of(1) == b"<s>"


def test_names_of_llama_2() -> None:
    names = TokenNames(LLAMA)
    spelled = [
        "▁true",
        "true" if "true" in LLAMA.get_vocab() else "a",
        "<0x61>",
        "<0xC3>",
        "字",
        "▁▁",
        "</s>",
    ]
    assert [names.name(id) for id in ids_of(LLAMA, *spelled)] == [
        " true", "a", r"bytes:\x61", r"bytes:\xc3", "字", "  ", "</s>",
    ]  # fmt: skip
    assert [names.bytes_of(id) for id in ids_of(LLAMA, "▁true", *BYTES)] == [
        b" true", *(bytes([byte]) for byte in range(256)),
    ]  # fmt: skip


def test_names_of_byte_level_tokens() -> None:
    tokenizer = TOKENIZERS["byte level"]
    names = TokenNames(tokenizer)
    ids = tokenizer("é🙂 true", add_special_tokens=False).input_ids
    assert b"".join(map(names.bytes_of, ids)) == "é🙂 true".encode()
    (part,) = [id for token, id in tokenizer.get_vocab().items() if token.startswith("s") and len(token) == 3]
    assert (names.name(part), names.bytes_of(part)) == (r"bytes:\x73\xe6\xbc", "s漢".encode()[:3])
    assert [names.name(id) for id in tokenizer("true a", add_special_tokens=False).input_ids][-1] == "a"


def test_namesakes_and_parts_of_characters_are_entries_of_their_own() -> None:
    """Else the greedy test of lm-evaluation-harness finds a likelier token under the name of this one."""
    own, *others = ids_of(LLAMA, "a", "<0x61>", "<0xC3>", "<0xC4>", "▁a")
    top = [TopToken(id, -float(number)) for number, id in enumerate([*others, own], 1)]
    found = completion_logprobs([LawfulToken(own, "a", 0, -5.0, top)], TokenNames(LLAMA))
    (names,), (name,) = found["top_logprobs"], found["tokens"]
    assert names == {name: -5.0, r"bytes:\x61": -1.0, r"bytes:\xc3": -2.0, r"bytes:\xc4": -3.0, " a": -4.0}
    assert max(names, key=names.__getitem__) != name == "a"


def test_a_pair_without_a_tokenizer() -> None:
    names = TokenNames(None)
    assert (names.name(7), names.bytes_of(7)) == ("token_id:7", b"")


def test_special_tokens_of_a_prompt_have_text_where_it_spells_them_out() -> None:
    ids = ids_of(LLAMA, "<s>", "▁The", "</s>", "▁a")
    for text, begins in (("<s>The</s> a", [0, 3, 6, 10]), ("The</s> a", [0, 0, 3, 7]), (None, [0, 0, 3, 3])):
        found = of_prompt(EncodedPrompt(ids, text), None, LLAMA)
        assert [token.offset for token in found] == begins
        assert text is None or "".join(token.text for token in found) == text


# --- a server ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spaced() -> sprinter.Pair:
    """The built-in models with tokens as Llama 2 spells them."""
    pair = builtin_pair()
    return sprinter.Pair(dataclasses.replace(pair.models, tokenizer=LLAMA), pair.gate)


@pytest.fixture(scope="module")
def llama(spaced: sprinter.Pair) -> Iterator[Running]:
    with serving(spaced, rows=2) as found:
        yield found


def bias(*tokens: str) -> dict[str, float]:
    return {str(id): 100.0 for id in ids_of(LLAMA, *tokens)}


PROMPT = ids_of(LLAMA, "<s>", "▁The", "▁answer", "▁is")
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 8, "seed": 3, "logprobs": 5}
PARTS = bias("<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁true", "a", "<0x61>")


def answers(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choice, whole and put together from events."""
    whole = server.post("/v1/completions", body).json()["choices"][0]
    with server.http() as http:
        lines = http.post("/v1/completions", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    streamed: dict[str, Any] = {"text": "".join(event["text"] for event in events), "logprobs": {}}
    for event in events:
        for name, values in (event["logprobs"] or {}).items():
            streamed["logprobs"].setdefault(name, []).extend(values)
    return [whole, streamed]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_name_is_the_greedy_tokens(llama: Running, echo: bool, seed: int) -> None:
    """What lm-evaluation-harness reads: a token is greedy if no other name is likelier."""
    for answer in answers(llama, BODY | {"echo": echo, "seed": seed, "logit_bias": PARTS}):
        found = answer["logprobs"]
        for name, logprob, top in zip(
            *(found[n] for n in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        ):
            if logprob is None:
                continue
            assert top[name] == logprob
            assert len(top) == 5 + (logprob < sorted(top.values())[-5])
            assert list(top.values()).count(max(top.values())) == 1


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [[], ["#"], ["true true is"], ["a" * 500]])
def test_offsets_do_not_depend_on_stop_strings_that_never_match(
    llama: Running, echo: bool, stop: list[str]
) -> None:
    wanted = bias("▁true", "▁is", "▁a")
    prompt = len("The answer is") if echo else 0
    for answer in answers(llama, BODY | {"echo": echo, "stop": stop, "logit_bias": wanted}):
        text, found = answer["text"], answer["logprobs"]
        offsets, tokens = found["text_offset"], found["tokens"]
        new = [(at, name) for at, name in zip(offsets, tokens, strict=True)][-8:]
        assert new[0][0] == prompt and text[prompt:].startswith((" true", " is", " a"))
        assert [text[at:].startswith(name) for at, name in new] == [True] * 8
        if echo:
            assert offsets[:4] == [0, 0, 3, 10] and tokens[:4] == ["<s>", " The", " answer", " is"]


def test_bytes_of_parts_of_characters_in_a_chat(llama: Running) -> None:
    LLAMA.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    body = {
        "messages": [{"role": "user", "content": "a b"}], "max_tokens": 12, "seed": 3, "logprobs": True,
        "top_logprobs": 4, "logit_bias": bias("<0xF0>", "<0x9F>", "<0x99>", "<0x82>"),
    }  # fmt: skip
    choice = llama.post("/v1/chat/completions", body).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    (own,) = {len(token["bytes"]) for token in tokens}
    assert own == 1 and all(token["token"] == rf"bytes:\x{token['bytes'][0]:02x}" for token in tokens)
    for token in tokens:
        names = [one["token"] for one in token["top_logprobs"]]
        assert len({*names}) == 4
        assert all(one["bytes"] for one in token["top_logprobs"])
