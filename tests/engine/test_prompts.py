"""Prompts as users give them: one BOS, white space at the end of a continued message, and seeds that are drawn."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.spellings import ids_of, llama2

import sprinter
from sprinter.engine.chat import render_chat
from sprinter.engine.prompt import encode
from sprinter.random import drawn_seed, following_seed

TRIMS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
KEEPS = TRIMS.replace(" | trim", "")


@pytest.fixture
def pair() -> sprinter.Pair:
    """The built-in models with tokens as Llama 2 spells them, of which a BOS begins texts."""
    loaded, tokenizer = sprinter.load_pair(), llama2()
    tokenizer.chat_template = TRIMS
    return sprinter.Pair(dataclasses.replace(loaded.models, tokenizer=tokenizer), loaded.gate)


@pytest.mark.parametrize(("text", "count"), [("a b", 1), ("<s>a b", 1), ("<s><s>a b", 2), ("a<s>b", 1)])
def test_a_text_begins_with_one_bos(pair: sprinter.Pair, text: str, count: int) -> None:
    """One is added unless the text has its own; those that it has stay."""
    bos = pair.tokenizer.bos_token_id
    ids = encode(text, pair.models)
    assert ids[: count + 1].count(bos) == count and ids[0] == bos
    assert ids.count(bos) == max(1, text.count("<s>") + (not text.startswith("<s>")))
    assert pair.generate(text, max_new_tokens=1).prompt_ids == ids


def test_the_text_of_a_chat_template_is_read_as_its_messages(pair: sprinter.Pair) -> None:
    rendered = pair.render_chat([{"role": "user", "content": "a b"}])
    assert encode(rendered.text, pair.models) == rendered.ids
    assert rendered.ids[:2].count(pair.tokenizer.bos_token_id) == 1


def test_a_tokenizer_that_adds_no_bos_leaves_two_that_a_text_has(pair: sprinter.Pair) -> None:
    plain = sprinter.load_pair()
    (bos,) = ids_of(plain.tokenizer, plain.tokenizer.eos_token)
    plain.tokenizer.bos_token = plain.tokenizer.eos_token
    assert encode(plain.tokenizer.bos_token * 2 + "a", plain.models)[:2] == [bos, bos]


@pytest.mark.parametrize("template", [TRIMS, KEEPS], ids=["trims", "keeps"])
@pytest.mark.parametrize("said", ["a b", "a b ", "a b\n\n", " a b \t", " ", "\n", "</s> a "])
def test_a_continued_message_keeps_the_white_space_at_its_end(
    pair: sprinter.Pair, template: str, said: str
) -> None:
    pair.tokenizer.chat_template = template
    messages = [{"role": "user", "content": "c"}, {"role": "assistant", "content": said}]
    begins = said if template is KEEPS or not said.strip() else said.lstrip()
    text = render_chat(messages, pair.models).text
    assert text == f"<s>user:c</s><s>assistant:{begins}"


# --- seeds ------------------------------------------------------------------------------------------------------------
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0}


def test_seed_minus_one_is_another_seed_each_time() -> None:
    pair, prompt = sprinter.load_pair(), "The first king of"
    named: dict[str, Any] = {"method": "speculative", **OPTIONS}
    options = sprinter.GenerationOptions(seed=-1, **named)
    outs = [pair.generate(prompt, options) for _ in range(2)]
    outs += pair.generate([prompt] * 2, options)
    stream = pair.stream(prompt, options)
    outs.append(stream.finish())
    seeds = [out.request.seed for out in outs if out.request is not None]
    assert len({*seeds}) == 5 and min(seeds) >= 0 and len({out.text for out in outs}) == 5
    for out, seed in zip(outs, seeds, strict=True):
        assert pair.generate(prompt, seed=seed, **named).text == out.text


def test_seeds_that_follow_a_negative_one_pass_over_minus_one() -> None:
    assert [following_seed(-3, i) for i in range(5)] == [-3, -2, 0, 1, 2]
    assert drawn_seed(-3) == -3 != drawn_seed(-1) >= 0
