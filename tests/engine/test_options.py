"""Options: one list, taken whole or as keywords by every call, and lists of prompts."""

from __future__ import annotations

import inspect
import json
from types import MappingProxyType
from typing import Any, get_overloads

import numpy as np
import pytest
import torch

import sprinter
from sprinter.decode import Method
from sprinter.engine.batch import options_of_each
from sprinter.engine.options import OPTIONS as ALL
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.errors import OptionError, UserError
from sprinter.models.reduced_vocab import kept_tokens

PROMPT = [3, 1, 4, 1, 5]
OTHER = [2, 7, 1]
OPTIONS = GenerationOptions(method="sprinter(tau=0.5)", max_new_tokens=9, temperature=0.8, seed=3)


def ids(out: sprinter.Generation) -> list[int]:
    return [token.id for token in out.tokens]


def test_the_keywords_are_the_fields_in_the_same_order() -> None:
    names = [*ALL]
    assert [*GenerationKeywords.__annotations__] == [*names, "sampling"]
    assert list(GenerationOptions().to_dict()) == names
    about = inspect.getdoc(GenerationOptions) or ""
    assert [name for name in names if f"\n    {name}: " not in about] == [], "the docstring says all of them"


def test_options_hold_plain_checked_values() -> None:
    options = GenerationOptions(
        method="speculative(gamma=3)", top_k=np.int64(4), temperature=np.float32(0.5), stop="a", stop_token_ids=7  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(options.method, sprinter.Method)
    assert (options.top_k, options.temperature, options.stop, options.stop_token_ids) == (
        4,
        0.5,
        ("a",),
        (7,),
    )
    assert [type(value) for value in (options.top_k, options.temperature)] == [int, float]
    assert options == GenerationOptions(**json.loads(json.dumps(options.to_dict())))
    with pytest.raises(UserError, match="seed cannot be changed: make another GenerationOptions"):
        options.seed = 1  # type: ignore[misc]


def test_options_that_change_nothing_are_the_same_object() -> None:
    assert OPTIONS.replace() is OPTIONS and OPTIONS.replace(seed=3) is OPTIONS
    changed = OPTIONS.replace(seed=4)
    assert (changed.seed, changed.method, OPTIONS.seed) == (4, OPTIONS.method, 3)
    assert OPTIONS.replace(temperature=0.8) is OPTIONS
    assert OPTIONS.replace(top_k=4).sampling == sprinter.Sampling(0.8, 4), "the others stay"


@pytest.mark.parametrize("word", ["temprature", "max_tokens", "stop_tokens"])
def test_unknown_keywords_name_the_nearest(tiny_pair: sprinter.Pair, word: str) -> None:
    near = {"temprature": "temperature", "max_tokens": "max_new_tokens", "stop_tokens": "stop_token_ids"}[
        word
    ]
    with sprinter.Engine(tiny_pair, rows=1, max_len=32) as engine:
        for call in (tiny_pair.generate, tiny_pair.stream, engine.add):
            with pytest.raises(TypeError, match=f"unknown option '{word}': did you mean '{near}'"):
                call(PROMPT, **{word: 1})  # type: ignore[operator]
    for make in (GenerationOptions, OPTIONS.replace):
        with pytest.raises(OptionError) as caught:
            make(**{word: 1})  # type: ignore[operator]
        assert isinstance(caught.value, UserError)
    with pytest.raises(OptionError):
        tiny_pair.generate_batch([PROMPT, OTHER], **{word: [1, 2, 3]})


def test_sampling_stands_for_four_options(tiny_pair: sprinter.Pair) -> None:
    sampling = sprinter.Sampling(temperature=0.6, top_k=5, top_p=0.9, min_p=0.01)
    options = GenerationOptions(sampling=sampling)
    assert options.sampling == sampling
    assert options == GenerationOptions(temperature=0.6, top_k=5, top_p=0.9, min_p=0.01)
    assert OPTIONS.replace(sampling=sampling).sampling == sampling
    own = tiny_pair.generate(PROMPT, temperature=0.6, top_k=5, top_p=0.9, min_p=0.01, max_new_tokens=8)
    assert ids(tiny_pair.generate(PROMPT, sampling=sampling, max_new_tokens=8)) == ids(own)
    with pytest.raises(UserError, match="sampling= and top_k= say the same thing: give one of them"):
        tiny_pair.generate(PROMPT, sampling=sampling, top_k=5)
    with pytest.raises(UserError, match=r"sampling=0.5 is not a sprinter.Sampling"):
        tiny_pair.generate(PROMPT, sampling=0.5)  # type: ignore[call-overload]


def test_every_call_takes_options_whole_or_as_keywords(tiny_pair: sprinter.Pair) -> None:
    expected = ids(
        tiny_pair.generate(PROMPT, method="sprinter(tau=0.5)", max_new_tokens=9, temperature=0.8, seed=3)
    )
    texts = [
        tiny_pair.generate(PROMPT, OPTIONS),
        tiny_pair.generate(PROMPT, options=OPTIONS.replace(seed=9), seed=3),
        tiny_pair.stream(PROMPT, OPTIONS).finish(),
        *tiny_pair.generate_batch([PROMPT], OPTIONS),
        *tiny_pair.generate([PROMPT, PROMPT], OPTIONS),
    ]
    with sprinter.Engine(tiny_pair, rows=2, max_len=32) as engine:
        numbers = [engine.add(PROMPT, OPTIONS), engine.add(PROMPT, OPTIONS.replace(seed=9), seed=3)]
        done = engine.finish()
        texts += [done[number] for number in numbers]
    assert [ids(text) for text in texts] == [expected] * 8


def test_the_object_itself_reaches_the_result(tiny_pair: sprinter.Pair) -> None:
    with sprinter.Engine(tiny_pair, rows=2, max_len=32) as engine:
        engine.add(PROMPT, OPTIONS)
        (served,) = engine.finish().values()
    outs = [tiny_pair.generate(PROMPT, OPTIONS), tiny_pair.stream(PROMPT, OPTIONS).generation, served]
    outs += tiny_pair.generate([PROMPT, OTHER], OPTIONS)
    assert [out.request is OPTIONS for out in outs] == [True] * 5


def test_what_was_left_open_is_filled_in(tiny_pair: sprinter.Pair) -> None:
    out = tiny_pair.generate(PROMPT, GenerationOptions(max_new_tokens=None, seed=2))
    assert out.request is not None and out.request.method is not None
    assert (out.request.max_new_tokens, out.request.seed) == (96 - len(PROMPT), 2)
    assert out.request.method.name.startswith("auto(")
    assert ids(tiny_pair.generate(out.prompt_ids, out.request)) == ids(out)


@pytest.mark.parametrize("options", ["sprinter", {"seed": 1}, sprinter.Sampling(), [OPTIONS]], ids=repr)
def test_what_is_no_options_object_is_refused(tiny_pair: sprinter.Pair, options: Any) -> None:
    with pytest.raises(
        UserError, match=r"is not a sprinter.GenerationOptions: give one, or keywords"
    ) as caught:
        tiny_pair.generate(PROMPT, options)
    assert "\n" not in str(caught.value)


def test_a_list_of_prompts_gives_a_list_of_texts(
    tiny_pair: sprinter.Pair, builtin_pair: sprinter.Pair
) -> None:
    outs = tiny_pair.generate([PROMPT, OTHER], [OPTIONS, OPTIONS.replace(seed=4)])
    assert [out.prompt_ids for out in outs] == [PROMPT, OTHER]
    assert [ids(out) for out in outs] == [
        ids(tiny_pair.generate(PROMPT, OPTIONS)), ids(tiny_pair.generate(OTHER, OPTIONS, seed=4)),
    ]  # fmt: skip
    texts = builtin_pair.generate(("One", "Two rivers"), max_new_tokens=3)
    assert [out.prompt for out in texts] == ["One", "Two rivers"]
    (mixed, _) = builtin_pair.generate([[5, 6], "Two"], max_new_tokens=2)
    assert mixed.prompt_ids == [5, 6]
    assert tiny_pair.generate([]) == [] == tiny_pair.generate((), OPTIONS)


@pytest.mark.parametrize(
    "prompt", [PROMPT, tuple(PROMPT), np.array(PROMPT), [np.int64(i) for i in PROMPT], torch.tensor(PROMPT),
               list(torch.tensor(PROMPT))], ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_a_list_of_numbers_is_one_prompt(tiny_pair: sprinter.Pair, prompt: Any) -> None:
    out = tiny_pair.generate(prompt, max_new_tokens=2)
    assert isinstance(out, sprinter.Generation) and out.prompt_ids == PROMPT
    (first, second) = tiny_pair.generate([prompt, prompt], max_new_tokens=2)
    assert ids(first) == ids(second) == ids(out)


@pytest.mark.parametrize("prompt", [[], ["hello"], [[1], [2]]], ids=repr)
def test_a_stream_takes_one_prompt(tiny_pair: sprinter.Pair, prompt: Any) -> None:
    with pytest.raises(UserError, match=r"the prompt is empty|neither text nor a flat sequence"):
        tiny_pair.stream(prompt)


def test_bad_lists_of_options(tiny_pair: sprinter.Pair) -> None:
    with pytest.raises(
        UserError, match="options has 1 values for 2 prompts: give one for all, or one per prompt"
    ):
        tiny_pair.generate([PROMPT, OTHER], [OPTIONS])
    with pytest.raises(UserError, match=r"prompt 1: options=5 is not a sprinter.GenerationOptions"):
        tiny_pair.generate([PROMPT, OTHER], [OPTIONS, 5])  # type: ignore[list-item]
    with pytest.raises(UserError, match="prompt 0: the prompt is text and this pair has no tokenizer"):
        tiny_pair.generate(["hello"])


def test_one_object_serves_all_prompts_and_keywords_make_one_for_each() -> None:
    assert all(one is OPTIONS for one in options_of_each(OPTIONS, {}, 3))
    first, second, third = options_of_each(OPTIONS, {"seed": [3, 4, 5], "stop": [["a"], None, []]}, 3)
    assert [one.seed for one in (first, second, third)] == [3, 4, 5]
    assert [one.stop for one in (first, second, third)] == [("a",), (), ()]
    assert [one.stop for one in options_of_each(None, {"stop": ["a", "b"]}, 3)] == [("a", "b")] * 3
    shared = options_of_each([None, OPTIONS], {"temperature": 0.5}, 2)
    assert [(one.temperature, one.max_new_tokens) for one in shared] == [(0.5, 64), (0.5, 9)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": ""}, "stop='' is not text or a list of texts, none of them empty: give some text"),
        (
            {"stop": ["a", ""]},
            "stop=['a', ''] is not text or a list of texts, none of them empty: give some text, not ''",
        ),
        ({"stop": [1]}, "stop=[1] is not text or a list of texts"),
        ({"stop": ["a", None]}, "stop=['a', None] is not text or a list of texts"),
        ({"stop": b"abc"}, "stop=b'abc' is not text or a list of texts"),
        ({"stop_token_ids": -1}, "stop_token_ids=-1 is out of range: give a whole number >= 0"),
        ({"stop_token_ids": b"ab"}, "stop_token_ids=b'ab' is not a whole number: give one >= 0"),
        ({"stop_token_ids": [True]}, "stop_token_ids=True is not a whole number"),
        ({"stop_token_ids": torch.tensor([True])}, "stop_token_ids=True is not a whole number"),
        ({"stop_token_ids": np.array(1.5)}, "stop_token_ids=1.5 is not a whole number"),
        ({"stop_token_ids": torch.tensor([[1]])}, "stop_token_ids=[1] is not a whole number"),
        (
            {"sampling": {"top_k": 5}},
            "sampling={'top_k': 5} is not a sprinter.Sampling: give sampling=sprinter.",
        ),
        ({"rules": 5}, "rules=5 is not a state of rules: give the .rules of an earlier generation"),
    ],
    ids=str,
)
def test_values_of_the_wrong_kind_are_refused_on_creation(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        GenerationOptions(**options)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given", [np.array([1, 2]), torch.tensor([1, 2]), [torch.tensor(1), np.array(2)], range(1, 3)], ids=repr
)
def test_stop_tokens_may_be_arrays(given: Any) -> None:
    found = GenerationOptions(stop_token_ids=given).stop_token_ids
    assert found == (1, 2) and {type(id) for id in found} == {int}


@pytest.mark.parametrize("given", [1, np.array(1), torch.tensor(1)], ids=repr)
def test_one_stop_token_needs_no_list(given: Any) -> None:
    assert GenerationOptions(stop_token_ids=given).stop_token_ids == (1,)


def test_a_mapping_of_rules_is_copied() -> None:
    given = {"trust": [], "stop": [5]}
    options = GenerationOptions(rules=given)
    given["stop"].append(1)
    options.to_dict()["rules"]["stop"].append(2)
    assert options.rules == {"trust": [], "stop": [5]}
    assert GenerationOptions(rules=MappingProxyType(given)).to_dict()["rules"] == given
    assert hash(options) == hash(GenerationOptions(rules={"trust": [], "stop": [5]}))


def test_a_copy_keeps_the_class() -> None:
    class Own(GenerationOptions):
        pass

    assert type(Own(seed=1).replace(seed=2)) is Own


def test_texts_of_numpy_are_prompts(builtin_pair: sprinter.Pair) -> None:
    words = ["One", "Two rivers"]
    outs = builtin_pair.generate([np.str_(word) for word in words], max_new_tokens=3)
    assert [ids(out) for out in outs] == [ids(out) for out in builtin_pair.generate(words, max_new_tokens=3)]


@pytest.mark.parametrize("values", [range(2), np.array([1, 2]), torch.tensor([1, 2]), {1, 2}], ids=repr)
def test_values_for_each_prompt_are_a_list(tiny_pair: sprinter.Pair, values: Any) -> None:
    message = f"seed is of type {type(values).__name__}: give one value, or a list with one per prompt"
    with pytest.raises(UserError, match=message):
        tiny_pair.generate([PROMPT, OTHER], seed=values)
    outs = tiny_pair.generate(
        [PROMPT, OTHER], seed=[int(seed) for seed in values], stop_token_ids=range(20, 22)
    )
    assert [out.request.seed for out in outs if out.request is not None] == [int(seed) for seed in values]


def test_options_are_checked_without_prompts_too(tiny_pair: sprinter.Pair) -> None:
    for options in (
        {"temperature": -1},
        {"stop": ["a", ""]},
        {"options": 5},
        {"seed": [1]},
        {"seed": range(0)},
    ):
        with pytest.raises(UserError):
            tiny_pair.generate([], **options)
    assert tiny_pair.generate([], [], seed=[], stop=["a"], stop_token_ids=[], temperature=0.5) == []


def test_the_type_of_keywords_is_public() -> None:
    assert sprinter.GenerationKeywords is GenerationKeywords


def test_several_prompts_take_the_keywords_of_a_batch(tiny_pair: sprinter.Pair) -> None:
    several = get_overloads(sprinter.Pair.generate)[1]
    batch = inspect.signature(sprinter.Pair.generate_batch).parameters
    assert list(inspect.signature(several).parameters)[2:] == list(batch)[2:]
    outs = tiny_pair.generate([PROMPT, OTHER], rows=1, max_new_tokens=2, memory_bytes=None, seed=[1, 2])
    assert [len(out.tokens) for out in outs] == [2, 2]


@pytest.mark.parametrize(
    ("method", "temperature", "lossless"),
    [
        (None, 1.0, True),
        ("speculative(gamma=3)", 1.0, True),
        ("sprinter(tau=0.5)", 1.0, False),
        ("typical", 0.0, True),
        ("typical", 1.0, False),
        ("opt(epsilon=0.1)", 1.0, False),
        ("allocation(share=0.5)", 1.0, False),
    ],
)
def test_require_lossless_refuses_lossy_methods(
    tiny_pair: sprinter.Pair, method: str | None, temperature: float, lossless: bool
) -> None:
    given: dict[str, Any] = {"method": method, "temperature": temperature, "max_new_tokens": 4}
    out = tiny_pair.generate(PROMPT, **given)
    assert out.stats.lossless is lossless
    if lossless:
        assert ids(tiny_pair.generate(PROMPT, require_lossless=True, **given)) == ids(out)
        return
    with pytest.raises(UserError, match="is lossy, and require_lossless=True refuses it"):
        tiny_pair.generate(PROMPT, require_lossless=True, **given)


def test_require_lossless_is_true_or_false() -> None:
    with pytest.raises(UserError, match="require_lossless='yes' is neither True nor False"):
        GenerationOptions(require_lossless="yes")  # type: ignore[arg-type]


LONG = 10**5000


@pytest.mark.parametrize(
    "given",
    [
        {name: LONG}
        for name in (
            "max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "presence_penalty",
            "min_new_tokens", "seed", "stop_token_ids", "logprobs", "budget", "switches", "ahead",
        )
    ] + [{"logit_bias": {LONG: 1}}, {"logit_bias": {1: LONG}}, {"bad_words": [[-LONG]]}, {"stop_token_ids": [-LONG]}],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_numbers_that_python_does_not_print_are_one_line(given: Any) -> None:
    with pytest.raises(UserError, match="has more than 308 digits: give a smaller number"):
        sprinter.GenerationOptions(**given)
    if "temperature" in given:
        with pytest.raises(UserError, match="temperature has more than 308 digits"):
            sprinter.Sampling(**given)


def test_long_token_ids_and_caps_are_one_line(tiny_pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="a token id in the prompt has more than 308 digits"):
        tiny_pair.generate([LONG])
    with pytest.raises(UserError, match="cap has more than 308 digits"):
        Method(cap=LONG)


def test_half_a_surrogate_pair_is_no_text(builtin_pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match=r"bad_words=.* is not a list of texts"):
        builtin_pair.stream("Once", bad_words=["a\ud800"])
    with pytest.raises(UserError, match="is not text or a list of texts"):
        builtin_pair.stream("Once", stop="\ud800")


def test_an_unknown_option_of_load_pair_has_its_nearest_name() -> None:
    with pytest.raises(UserError, match="unknown option of load_pair 'compil': did you mean 'compile'"):
        sprinter.load_pair(compil=False)


def test_long_numbers_for_load_pair_are_one_line() -> None:
    with pytest.raises(UserError, match="draft_vocabulary has more than 308 digits"):
        sprinter.load_pair(draft_vocabulary=LONG)
    with pytest.raises(UserError, match="draft_vocabulary has more than 308 digits"):
        kept_tokens(LONG, 100, ())
