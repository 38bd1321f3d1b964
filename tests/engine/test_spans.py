"""``only=``: which tokens of a text are in a span, read token by token and after rewinds; real generations."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.test_text import SILENT, TOKENIZER, bytes_of

import sprinter
from sprinter.decode.accept import GreedyMatch
from sprinter.decode.enumerate import MarkovPair, run_chain
from sprinter.decode.loop import Limits
from sprinter.decode.method import Method
from sprinter.decode.stop import Fixed
from sprinter.engine.spans import SpanReader
from sprinter.engine.stream import Spelling
from sprinter.errors import UserError
from sprinter.random import AddressedDraws

SPELLING = Spelling(TOKENIZER, SILENT)
PARTS = (
    "```",
    "`",
    "\n",
    "\n```",
    "  ```py\n",
    "\n````\n",
    "\n~~~ `\n",
    "- ```js\n",
    "\n> ",
    "\n```\n",
    "<think>",
    "</think>",
    "</thi",
    "nk>",
    "x",
    " the",
    "字",
)


def fenced(text: str) -> bool:
    """Whether a fence is open after the whole lines of a text."""
    fence: tuple[str, int] | None = None
    for line in text.split("\n")[:-1]:
        body = line.lstrip(" \t>")
        if fence is not None:
            alone = body.rstrip(" \t")
            fence = None if set(alone) == {fence[0]} and len(alone) >= fence[1] else fence
            continue
        if item := re.match(r"([-*+]|\d+[.)])[ \t]+", body):
            body = body[item.end() :]
        run = len(body) - len(body.lstrip(body[:1]))
        if run >= 3 and (body[0] == "~" or (body[0] == "`" and "`" not in body[run:])):
            fence = body[0], run
    return fence is not None


def lossy(only: str, text: str) -> bool:
    """The same, read off the whole text line by line."""
    name, wanted = only.removeprefix("not-"), not only.startswith("not-")
    if name == "code":
        inside = fenced(text)
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


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("```pip install x``` installs it\nand", False), ("say:\n- ```py\n  a = 1\n", True),
        ("- ```py\n  a = 1\n  ```\n", False), ("````\n```\n", True), ("~~~\n```\n~~~\n", False),
        ("```py\r\na\r\n```\r\n", False), ("```py\r\na\r\n", True),
        ("```py\na\n```x\n", True), ("```py", False), ("a ```\nb\n", False),
        (f"```py {'x' * 400}\na\n", True), (f"~~~ {'`' * 400}\na\n", True), (f"```py {'x' * 400}`\na\n", False),
        (f"```py `{'x' * 400}\na\n", False), (f"```\na\n```{' ' * 400}\n", False),
        (f"```\na\n```{' ' * 400}x\n", True), (f"{'x' * 400}\n```py\n", True),
    ],
)  # fmt: skip
def test_fences_of_markdown(text: str, inside: bool) -> None:
    reader = SpanReader("code", bytes_of("p"), SPELLING)
    ids = bytes_of("p\n" + text)
    for end in range(1, len(ids) + 1):
        found = reader(ids[:end])
    assert found == inside


def test_a_stop_token_in_the_prompt_hides_nothing() -> None:
    (newline,) = bytes_of("\n")
    prompt = bytes_of("x\n```py\na = 1\nb")
    spelling = Spelling(TOKENIZER, SILENT | {newline})
    assert SpanReader("code", prompt, spelling)(prompt)


def test_a_head_does_not_confuse_the_reader() -> None:
    """Every text is shown to it, those of the head too, whose drafts are dropped."""
    shown: list[tuple[int, ...]] = []
    method = Method(stop=Fixed(3), accept=GreedyMatch(), head=4, only="code")

    def lossy(text: Sequence[int]) -> bool:
        if shown:
            assert len(text) <= len(shown[-1]) + 1 and tuple(text[:-1]) in {
                *shown,
                *(one[:-1] for one in shown),
            }
        shown.append(tuple(text))
        return True

    for seed in range(20):
        shown.clear()
        run_chain(method, MarkovPair(4, 3), (0,), Limits(12, lossy=lossy), AddressedDraws(seed))
        assert len(shown) > 12
