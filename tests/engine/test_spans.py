"""``only=``: which tokens of a text are in a span, read token by token and after rewinds; real generations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_text import SILENT, TOKENIZER, bytes_of

import sprinter
from sprinter.engine.ending import Spelling
from sprinter.engine.spans import SpanReader
from sprinter.errors import UserError

SPELLING = Spelling(TOKENIZER, SILENT)
PARTS = ("```", "`", "\n", "\n```", "  ```py\n", "<think>", "</think>", "</thi", "nk>", "x", " the", "字")


def lossy(only: str, text: str) -> bool:
    """The same, read off the whole text line by line."""
    name, wanted = only.removeprefix("not-"), not only.startswith("not-")
    if name == "code":
        inside = sum(line.lstrip(" \t").startswith("```") for line in text.split("\n")) % 2 == 1
    else:
        inside, rest = False, text
        while (mark := "</think>" if inside else "<think>") in rest:
            rest, inside = rest.split(mark, 1)[1], not inside
    return inside == wanted


@pytest.mark.parametrize("only", ["code", "not-code", "think", "not-think"])
@given(
    prompt=st.lists(st.sampled_from(PARTS), max_size=4),
    parts=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(PARTS)), max_size=16),
)
def test_spans_are_those_of_the_whole_text(
    only: str, prompt: list[str], parts: list[tuple[int, str]]
) -> None:
    """Every prefix of the text, whatever was drafted and dropped in between."""
    begin = bytes_of("".join(prompt))
    reader, text = SpanReader(only, begin, SPELLING), list(begin)
    assert reader(text) == lossy(only, TOKENIZER.decode(text))
    for dropped, part in parts:
        del text[max(len(begin), len(text) - dropped) :]
        for id in bytes_of(part):
            text.append(id)
            shown, found = TOKENIZER.decode(text), reader(text)
            if not shown.endswith("\ufffd"):  # within a character the last whole one decides
                assert found == lossy(only, shown), shown


def test_the_prompt_counts_after_its_last_special_token() -> None:
    """An earlier turn's open fence does not count; a template that opens <think> does."""
    turn = list(TOKENIZER("<|im_end|>", add_special_tokens=False)["input_ids"])
    assert SILENT.issuperset(turn)
    earlier = [*bytes_of("\n```py\nopen"), *turn, *bytes_of("assistant\n")]
    assert not SpanReader("code", earlier, SPELLING)(earlier)
    opened = [*earlier, *bytes_of("<think>\n")]
    reader = SpanReader("think", opened, SPELLING)
    text = [*opened, *bytes_of("so</think> yes")]
    assert reader(opened) and reader(text[:-8]) and not reader(text)


def test_a_mark_that_is_a_special_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (mark,) = TOKENIZER("<|x|>", add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(Spelling, "written", lambda self, id: "<think>" if id == mark else "")
    prompt = bytes_of("hello")
    reader = SpanReader("think", prompt, SPELLING)
    assert not reader(prompt) and reader([*prompt, mark])


def origins(tokens: Sequence[sprinter.Token]) -> set[str]:
    return {token.origin.value for token in tokens}


def test_a_generation_trusts_tokens_in_the_span_alone(builtin_pair: sprinter.Pair) -> None:
    text = "Sprinter writes code:\n```\nthe first king of"
    for prompt, only, trusting in (
        (text, "code", True), (text, "not-code", False), (text[:20], "code", False), (text[:20], "not-code", True),
    ):  # fmt: skip
        found = builtin_pair.generate(
            prompt, method=f"sprinter(tau=0.2, only={only})", max_new_tokens=24, temperature=0
        )
        assert "```" not in found.text
        assert ("trusted" in origins(found.tokens)) == trusting
        if not trusting:
            assert (
                found.text
                == builtin_pair.generate(
                    prompt, method="autoregressive", max_new_tokens=24, temperature=0
                ).text
            )


def test_tokens_that_were_taken_back_are_counted(builtin_pair: sprinter.Pair) -> None:
    options = {"max_new_tokens": 48, "temperature": 0.0, "seed": 1}
    prompt = "The first king of"
    guarded = builtin_pair.generate(prompt, method="sprinter(tau=0.2, tail_ratio=1)", **options)
    assert guarded.text == builtin_pair.generate(prompt, method="autoregressive", **options).text
    assert guarded.stats.taken_back > 0 and guarded.stats.lossless and guarded.stats.mean_drift == 0
    assert guarded.to_dict()["stats"]["taken_back"] == guarded.stats.taken_back
    builtin_pair.generate(prompt, method="sprinter(tau=0.2, tail_ratio=1)", **options, require_lossless=True)
    with pytest.raises(UserError, match="is lossy"):
        builtin_pair.generate(
            prompt, method="sprinter(tau=0.2, tail_ratio=0.5)", **options, require_lossless=True
        )


def test_without_a_tokenizer_it_is_refused(tiny_pair: sprinter.Pair) -> None:
    with pytest.raises(UserError, match="only=code needs a tokenizer"):
        tiny_pair.generate([1, 2, 3], method="sprinter(tau=0.5, only=code)", max_new_tokens=4)
