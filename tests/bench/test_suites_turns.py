"""From samples to token ids: conversations as text and through a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.bench.suite_files import put
from tests.models.tiny import VOCAB, fresh, tiny, word_tokenizer
from tests.training.labelling import tiny_pair, words

import sprinter
from sprinter.bench.sample import Sample
from sprinter.bench.suites import load_suite, turn_ids, turn_prompt
from sprinter.errors import UserError

TALK = Sample("a", "b", ("w20 w21", "w22", "w23"))
TEMPLATE = (
    "{% for m in messages %}{{ 'w50 ' if m.role == 'user' else 'w51 ' }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}w51{% endif %}"
)


def ids(text: str) -> list[int]:
    return list(word_tokenizer()(text)["input_ids"])


def chatting(template: str) -> sprinter.Pair:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return sprinter.load_pair(tiny("llama"), draft=fresh("gpt2"), tokenizer=tokenizer)


class Recording:
    """A tokenizer that records its calls."""

    chat_template = bos_token_id = bos_token = None

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.asked.append(text)
        return {"input_ids": [1]}


def test_turns_and_answers_are_parted_by_blank_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, tokenizer = tiny_pair(), Recording()
    models: Any = type("Models", (), {"tokenizer": tokenizer, "vocab_size": VOCAB, "context": 96})()
    assert turn_ids(models, TALK, 0, []) == [1]
    assert turn_ids(models, TALK, 2, ["w30", "w31 w32"]) == [1]
    assert tokenizer.asked == ["w20 w21", "w20 w21\n\nw30\n\nw22\n\nw31 w32\n\nw23"]
    assert (
        turn_ids(pair, TALK, 1, ["w30"]) == turn_ids(pair.models, TALK, 1, ["w30"]) == ids("w20 w21 w30 w22")
    )


def test_a_chat_template_is_used() -> None:
    pair = chatting(TEMPLATE)
    assert turn_ids(pair, TALK, 0, []) == ids("w50 w20 w21 w51")
    assert turn_ids(pair, TALK, 1, ["w30"]) == ids("w50 w20 w21 w51 w30 w50 w22 w51")
    assert turn_ids(pair, TALK, 1, ["w30"], chat=False) == ids("w20 w21 w30 w22")


def test_the_end_of_a_turn_ends_the_answer() -> None:
    """A template may end turns with a token that is no EOS of the target."""
    pair = chatting("{% for m in messages %}{{ m.content }} w60 {% endfor %}")
    assert pair.tokenizer is not None
    pair.tokenizer.add_special_tokens({"additional_special_tokens": ["w60"]})
    end = ids("w60")
    assert end[0] not in pair.models.target.eos_ids
    assert turn_prompt(pair, TALK, 0, []).stop_token_ids == tuple(end)
    assert turn_prompt(pair, TALK, 0, [], chat=False).stop_token_ids == ()


def test_a_chat_template_that_fails_is_a_one_line_error() -> None:
    with pytest.raises(UserError, match="chat template of the tokenizer fails") as caught:
        turn_ids(chatting("{{ raise_exception('no system\nat all') }}"), TALK, 0, [])
    assert "\n" not in str(caught.value)


def test_answers_must_be_as_many_as_the_turns_before() -> None:
    with pytest.raises(ValueError, match="zip"):
        turn_ids(tiny_pair(), TALK, 2, ["w30"])


def test_a_pair_without_a_tokenizer() -> None:
    models: Any = type("Models", (), {"tokenizer": None})()
    with pytest.raises(UserError, match="no tokenizer: give one with --tokenizer"):
        turn_ids(models, TALK, 0, [])


def test_prompts_beyond_the_context_are_given_all_the_same() -> None:
    """The harness counts and skips them."""
    assert len(turn_ids(tiny_pair(), Sample("a", "b", (words(5000),)), 0, [])) == 5000


def test_long_form_prompts_leave_the_rest_of_the_context(tmp_path: Path) -> None:
    file = put(tmp_path / "a.txt", f"{words(60)}\n{words(20)}\n{words(70)}\n")
    suite = load_suite(file, rule="long=32", tokenizer=tiny_pair().tokenizer)
    assert [len(turn_ids(tiny_pair(), sample, 0, [])) for sample in suite.samples] == [32, 32]
    assert suite.new_tokens == 0 and suite.skipped == {"too_short": 1}
    assert load_suite(file, rule="long=32", tokenizer=word_tokenizer(), new_tokens=9).new_tokens == 9
