"""Logits processors in the public calls: greedy texts, batches, ends, bad words, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import sprinter
from sprinter.engine.batch import options_of_each
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

PROMPT = [3, 1, 4, 1, 5]
OTHER = [2, 7, 1]
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.6, "logit_bias": {3: 2.0, 7: -4.0},
}  # fmt: skip
FORBIDDING: dict[str, Any] = {
    "bad_words": [[9], [4, 17], [5, 5]], "min_new_tokens": 6, "stop_token_ids": range(10, 22),
}  # fmt: skip


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


@pytest.mark.parametrize("options", [PENALTIES, FORBIDDING, PENALTIES | FORBIDDING], ids=len)
@pytest.mark.parametrize(
    "method",
    ["speculative(gamma=3)", "svip", "adaedl", "batch(drafts=3, gamma=2)", "specinfer", "lookup(n=2)",
     "sprinter(tau=1.0)"],
)  # fmt: skip
def test_greedy_texts_are_plain_decodings(
    tiny_pair: sprinter.Pair, method: str, options: dict[str, Any]
) -> None:
    options = {**options, "temperature": 0, "max_new_tokens": 24}
    plain = tiny_pair.generate(PROMPT, method="autoregressive", **options)
    out = tiny_pair.generate(PROMPT, method=method, **options)
    assert (ids(out), out.finish_reason) == (ids(plain), plain.finish_reason)
    assert ids(plain) != ids(
        tiny_pair.generate(PROMPT, method="autoregressive", max_new_tokens=24, temperature=0)
    )


def test_greedy_texts_are_those_of_transformers(tiny_pair: sprinter.Pair) -> None:
    model: Any = tiny_pair.models.target.model
    theirs = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=24, repetition_penalty=1.3, min_new_tokens=6,
        bad_words_ids=[[9], [4, 17], [5, 5]], sequence_bias=[[[3], 2.0], [[7], -4.0]],
        eos_token_id=list(range(10, 22)), pad_token_id=0,
    )  # fmt: skip
    own = tiny_pair.generate(
        PROMPT,
        temperature=0,
        max_new_tokens=24,
        repetition_penalty=1.3,
        logit_bias={3: 2.0, 7: -4.0},
        **FORBIDDING,
    )
    assert ids(own) == theirs[0, len(PROMPT) :].tolist()


def test_texts_of_a_batch_are_those_of_single_requests(tiny_pair: sprinter.Pair) -> None:
    base = GenerationOptions(method="speculative(gamma=3)", max_new_tokens=14)
    each = [
        base, base.replace(**PENALTIES), base.replace(**FORBIDDING, seed=4), base.replace(method="sprinter(tau=0.5)"),
        base.replace(method="batch(drafts=2, gamma=3)", **PENALTIES), base.replace(method="lookup", **FORBIDDING),
    ]  # fmt: skip
    prompts = [PROMPT, OTHER] * 3
    outs = tiny_pair.generate(prompts, each)
    assert [ids(out) for out in outs] == [
        ids(tiny_pair.generate(prompt, own)) for prompt, own in zip(prompts, each, strict=True)
    ]


def test_what_is_drafted_ahead_does_not_change_the_text(tiny_pair: sprinter.Pair) -> None:
    outs = [
        tiny_pair.generate(PROMPT, method="svip(h=2.0)", max_new_tokens=20, ahead=ahead, **PENALTIES)
        for ahead in (1, 4)
    ]
    assert ids(outs[0]) == ids(outs[1])


@pytest.mark.parametrize(
    "method", ["autoregressive", "speculative", "sprinter(tau=0.3)", "draft-only", "fuzzy"]
)
def test_no_end_comes_before_its_time(tiny_pair: sprinter.Pair, method: str) -> None:
    ends = list(range(1, 22))
    lengths = [
        len(
            tiny_pair.generate(
                PROMPT, method=method, stop_token_ids=ends, min_new_tokens=least, seed=seed
            ).tokens
        )
        for least in (0, 5)
        for seed in range(4)
    ]
    assert min(lengths[:4]) < 5 <= min(lengths[4:]) and max(lengths[4:]) < 20


def test_a_text_ends_with_eos_as_soon_as_it_may(builtin_pair: sprinter.Pair) -> None:
    (eos,) = builtin_pair.models.target.eos_ids
    out = builtin_pair.generate("The river", logit_bias={eos: 100}, min_new_tokens=7, max_new_tokens=20)
    assert (len(out.tokens), out.finish_reason, ids(out).index(eos)) == (8, "eos", 7)


@pytest.mark.parametrize(
    "method", ["autoregressive", "speculative", "sprinter(tau=0.1)", "lookup(n=2)", "random(rate=0.9)"]
)
def test_bad_words_are_not_written_across_tokens(builtin_pair: sprinter.Pair, method: str) -> None:
    """The prompt repeats them, so that both models, and prompt lookup, would write them."""
    words, tokenizer = ["the park", "the house"], builtin_pair.models.tokenizer
    assert tokenizer is not None
    spelled = [tokenizer(f" {word}", add_special_tokens=False)["input_ids"] for word in words]
    assert min(map(len, spelled)) > 1, "one token would be no test"
    prompt = "Tom and Lily went to the park. Tom and Lily went to the park. Tom and Lily went to"
    options: dict[str, Any] = {"method": method, "max_new_tokens": 12, "temperature": 0.3}
    plain = "".join(builtin_pair.generate(prompt, seed=seed, **options).text for seed in range(3))
    assert any(word in plain for word in words)
    for seed in range(3):
        out = builtin_pair.generate(prompt, seed=seed, bad_words=words, **options)
        for word in spelled:
            new = ids(out)
            assert all(new[i : i + len(word)] != word for i in range(len(new)))


BAD = [
    ({"repetition_penalty": 0}, "repetition_penalty=0 is out of range: give a number in [0.01, 100]"),
    ({"repetition_penalty": float("nan")}, "repetition_penalty=nan is out of range"),
    ({"presence_penalty": 2.5}, "presence_penalty=2.5 is out of range: give a number in [-2, 2]"),
    ({"frequency_penalty": "1"}, "frequency_penalty='1' is not a number: give one in [-2, 2]"),
    ({"logit_bias": {3: 101}}, "logit_bias={3: 101} is not a mapping of token ids to numbers in [-100, 100]"),
    ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1} is not a mapping of token ids"),
    ({"logit_bias": {-1: 1}}, "logit_bias={-1: 1} is not a mapping of token ids"),
    ({"logit_bias": 5}, "logit_bias=5 is not a mapping of token ids to numbers in [-100, 100]: give one"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1 is out of range: give a whole number >= 0"),
    ({"bad_words": 5}, "bad_words=5 is not a list of texts and lists of token ids, none of them empty: give"),
    ({"bad_words": [5]}, "bad_words=[5] is not a list of texts and lists of token ids"),
    ({"bad_words": ["a", ""]}, "bad_words=['a', ''] is not a list of texts and lists of token ids, none"),
    ({"bad_words": [[]]}, "bad_words=[[]] is not a list of texts"),
    ({"bad_words": [[1.5]]}, "bad_words=[[1.5]] is not a list of texts"),
    ({"logprobs": -1}, "logprobs=-1 is out of range: give a whole number >= 0"),
    ({"logprobs": True}, "logprobs=True is not a whole number"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD, ids=str)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        GenerationOptions(**options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {24: 1}}, "token id 24 in logit_bias is out of range: the vocabulary has 24 tokens"),
        ({"bad_words": [[1, 30]]}, "token id 30 in bad_words is out of range: the vocabulary has 24 tokens"),
        ({"bad_words": ["a"]}, "bad_words has a text and this pair has no tokenizer: give token ids"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is more than max_new_tokens=8: give at most 8"),
        ({"logprobs": 25}, "logprobs=25 is out of range: the vocabulary has 24 tokens"),
        ({"bad_words": [[id] for id in range(24)]}, "every token is forbidden after 0 new tokens"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_do_not_fit_the_pair_are_refused(
    tiny_pair: sprinter.Pair, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        tiny_pair.generate(PROMPT, **options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_options_survive_json() -> None:
    options = GenerationOptions(
        logit_bias={np.int64(5): 1, "3": -2.5}, bad_words=["a", [4, 5]], logprobs=2, min_new_tokens=3  # type: ignore[dict-item]
    )  # fmt: skip
    assert options.logit_bias == ((3, -2.5), (5, 1.0)) and options.bad_words == ("a", (4, 5))
    read = json.loads(json.dumps(options.to_dict()))
    assert GenerationOptions(**read) == options and hash(GenerationOptions(**read)) == hash(options)
    assert GenerationOptions(logit_bias=json.loads('{"3": -2.5, "5": 1}')).logit_bias == options.logit_bias
    assert GenerationOptions(bad_words="a").bad_words == ("a",)
    assert GenerationOptions(bad_words=None, logit_bias=None) == GenerationOptions()


def test_one_value_for_all_prompts_or_one_for_each() -> None:
    def found(name: str, value: Any) -> list[Any]:
        return [getattr(one, name) for one in options_of_each(None, {name: value}, 2)]

    assert found("bad_words", ["a", [4, 5]]) == [("a", (4, 5))] * 2
    assert found("bad_words", [[4, 5], [6, 7]]) == [((4, 5), (6, 7))] * 2
    assert found("bad_words", [["a"], [[4, 5]]]) == [("a",), ((4, 5),)]
    assert found("bad_words", [None, ["b"]]) == [(), ("b",)]
    assert found("logit_bias", {5: 1}) == found("logit_bias", [[5, 1]]) == [((5, 1.0),)] * 2
    assert found("logit_bias", [{5: 1}, None]) == [((5, 1.0),), ()]
    assert found("stop_token_ids", [[5], [6]]) == [(5,), (6,)]
