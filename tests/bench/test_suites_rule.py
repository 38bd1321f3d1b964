"""The rule that makes prompts of running text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.tiny import tiny_tokenizer
from tests.models.tiny import word_tokenizer

from sprinter.bench.suites import TextRule
from sprinter.errors import UserError


@pytest.mark.parametrize(("count", "length"), [(10, 3), (13, 3), (14, 4), (100, 30), (9, 0)])
def test_share_of_the_words(count: int, length: int) -> None:
    words = [f"w{n}" for n in range(count)]
    prompt, rest = TextRule().cut(" ".join(words))
    assert (prompt.split(), rest.split()) == (words[:length], words[length:] if length else [])


@given(st.text(alphabet="ab \n\t", max_size=80), st.floats(0.01, 0.99), st.integers(0, 6))
def test_prompt_and_rest_are_the_text(text: str, share: float, words: int) -> None:
    prompt, rest = TextRule(share=share, words=words, min_words=2).cut(text)
    if prompt:
        assert text.startswith(prompt) and prompt.split() + rest.split() == text.split()
        assert 1 <= len(prompt.split()) <= (words or 80) and rest
    else:
        assert rest == "" and len(text.split()) < 2


@pytest.mark.parametrize("tokens", range(1, 30))
def test_tokens_are_counted_at_ends_of_words(tokens: int) -> None:
    text, count = "ab cde f ghij klmno", tiny_tokenizer()  # one token per byte
    prompt, _ = TextRule.long_form(tokens).cut(text, count)
    fitting = [text[:end] for end in (2, 6, 8, 13) if end <= tokens < len(text)]
    assert prompt == (fitting[-1] if fitting else "")
    assert TextRule(share=0.3, tokens=4, min_words=1).cut(text, count)[0] == "ab"


def test_a_rule_that_counts_tokens_needs_a_tokenizer() -> None:
    with pytest.raises(UserError, match="give the pair's tokenizer"):
        TextRule.long_form(4).cut("a b c d e f")


def test_long_form_prompts_have_their_length() -> None:
    text = " ".join(f"w{20 + n % 30}" for n in range(50))
    prompt, rest = TextRule.long_form(32).cut(text, word_tokenizer())
    assert len(prompt.split()) == 32 and len(rest.split()) == 18
    assert TextRule.long_form(50).cut(text, word_tokenizer()) == ("", ""), "nothing would follow"


def test_rules_in_words() -> None:
    assert TextRule.parse("whole") == TextRule.whole() and TextRule.whole().takes_whole
    assert TextRule.parse("long=64") == TextRule.long_form(64) and TextRule.long_form(64).is_long_form
    base = TextRule(words=9, paragraphs=True)
    assert TextRule.parse("share=0.5", base) == TextRule(share=0.5, words=9, paragraphs=True)
    assert TextRule.parse("paragraphs=false, min_words=3", base) == TextRule(words=9, min_words=3)
    assert str(TextRule(words=200, min_words=60, paragraphs=True)) == (
        "first 30 % of the words, at most 200 words, of paragraphs of 60 words or more"
    )
    assert str(TextRule.long_form(64)) == "the beginning, at most 64 tokens, of texts"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("share", "is not a setting: write whole, long=64"),
        ("shares=0.5", "did you mean 'share'"),
        ("share=half", "'half' is not a value for share in the prompt rule: give a float"),
        ("paragraphs=maybe", "give a bool"),
        ("share=0", "share=0.0 must be above 0"),
        ("share=nan", "share=nan must be above 0"),
        ("words=-1", "words=-1 is out of range"),
        ("long=0", "long=0 is out of range: give a whole number >= 1"),
        ("long=5,words=3", "goes with no other setting"),
    ],
)
def test_rules_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        TextRule.parse(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)
