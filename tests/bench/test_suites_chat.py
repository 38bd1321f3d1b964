"""Suites in chat form: what is asked, records with messages and answers, and what has no chat form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.bench.suite_files import fill, put, put_lines
from tests.models.tiny import fresh, tiny, word_tokenizer

import sprinter
from sprinter.bench.quality.checks import right
from sprinter.bench.quality.measure import Answered, QualitySettings, measure
from sprinter.bench.sample import Sample, SampleCheck
from sprinter.bench.suites import load_suite, turn_ids
from sprinter.errors import UserError

MATHS = {"question": "How many legs have 3 cats?", "answer": "3 cats have <<3*4=12>>12 legs.\n#### 12"}
CODE = {
    "task_id": "T/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "test": "def check(f):\n    assert f(2) == 4\n",
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
}
TALK = [
    {"role": "system", "content": "w29"},
    {"role": "user", "content": "w21"},
    {"role": "assistant", "content": "w22"},
    {"role": "user", "content": "w23"},
    {"role": "assistant", "content": "w24"},
]
TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w50', 'assistant': 'w51', 'system': 'w52'}[m.role] }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}w51{% endif %}"
)


def chatting() -> sprinter.Pair:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return sprinter.load_pair(tiny("llama"), draft=fresh("gpt2"), tokenizer=tokenizer)


def test_choices_are_asked_for_with_the_letter_first(tmp_path: Path) -> None:
    data = fill(tmp_path)
    for name in ("commonsenseqa", "mmlu"):
        plain, chat = (load_suite(name, data, chat=chat) for chat in (False, True))
        asked, told = plain.samples[0].turns[0], chat.samples[0].turns[0]
        assert asked.endswith("Answer:") and not told.endswith("Answer:")
        assert (
            told.startswith(asked.removesuffix("Answer:").strip())
            and "Begin your answer with the letter" in told
        )
        assert chat.samples[0].check == plain.samples[0].check and "letter first" in chat.rule
        assert right(
            f"{chat.samples[0].check.answer}. Because A and B are no such thing.", chat.samples[0].check
        )


def test_maths_and_code_are_asked_as_a_user_would(tmp_path: Path) -> None:
    put_lines(tmp_path / "gsm8k_test.jsonl", [MATHS])
    put_lines(tmp_path / "humaneval.jsonl", [CODE])
    maths, code = (load_suite(name, tmp_path, chat=True) for name in ("gsm8k", "humaneval"))
    (sum_,), (function,) = maths.samples, code.samples
    assert (
        sum_.turns[0].startswith(MATHS["question"])
        and "####" in sum_.turns[0]
        and "Answer:" not in sum_.turns[0]
    )
    assert sum_.check == SampleCheck("number", "12") and maths.chat and maths.facts()["chat"] is True
    assert f"```python\n{CODE['prompt']}```" in function.turns[0]
    assert function.check == SampleCheck("code", CODE["test"], "double", code=CODE["prompt"])
    plain = load_suite("gsm8k", tmp_path)
    assert plain.samples[0].turns == (f"Question: {MATHS['question']}\nAnswer:",) and not plain.chat
    assert maths.rule != plain.rule and "system" not in plain.facts()


def test_a_conversation_of_a_record_is_asked_turn_by_turn(tmp_path: Path) -> None:
    file = put_lines(tmp_path / "talks.jsonl", [{"messages": TALK}, {"messages": TALK[1:4]}])
    suite = load_suite(file, chat=True)
    assert suite.samples[0] == Sample("1", "talks", ("w21", "w23"), ("w22", "w24"), system="w29")
    assert suite.samples[1] == Sample("2", "talks", ("w21", "w23"))
    pair = chatting()
    assert pair.tokenizer is not None
    ids = turn_ids(pair, suite.samples[0], 1, ["w27 w28"])
    assert pair.tokenizer.decode(ids) == "w52 w29 w50 w21 w51 w27 w28 w50 w23 w51"
    with_system = load_suite(put_lines(tmp_path / "b.jsonl", [{"prompt": "w21"}]), chat=True, system="w28")
    assert with_system.facts()["system"] == "w28"
    ids = turn_ids(pair, with_system.samples[0], 0, [])
    assert pair.tokenizer.decode(ids) == "w52 w28 w50 w21 w51"


def test_answers_of_records_are_references_and_checks(tmp_path: Path) -> None:
    (sample,) = load_suite(put_lines(tmp_path / "own.jsonl", [MATHS])).samples
    assert sample.check == SampleCheck("number", "12") and sample.references == (
        "3 cats have 12 legs.\n#### 12",
    )
    (sample,) = load_suite(put_lines(tmp_path / "functions.jsonl", [CODE]), chat=True).samples
    assert sample.check is not None and sample.check.code == CODE["prompt"]


@pytest.mark.parametrize(
    ("text", "correct"),
    [
        ("3 * 4 = 12\n#### 12\nAll 3 cats are counted.", True),
        ("#### 13\nOr 12?", False),
        ("**#### $1,200.00**", False),
        ("The answer is 12.", True),
        ("#### twelve, that is 12", True),
        ("", False),
    ],
)
def test_the_number_of_a_chat_answer(text: str, correct: bool) -> None:
    assert right(text, SampleCheck("number", "12")) is correct


def test_the_code_of_a_chat_answer_is_run_with_the_prompt_of_the_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_lines(tmp_path / "humaneval.jsonl", [CODE])
    (sample,) = load_suite("humaneval", tmp_path, chat=True).samples
    run: list[str] = []

    def passes(prompt: str, text: str, check: SampleCheck) -> Any:
        run.append(check.code)
        return type("Outcome", (), {"passed": True})

    monkeypatch.setattr("sprinter.bench.quality.measure.passes", passes)
    settings = QualitySettings(rouge=False, likelihood=False, run_code=True)
    answer = Answered(sample, [[1]], [[2]], ["```\nx\n```"])
    assert measure(chatting(), [answer], settings)[0]["pass_at_1"] == 1.0
    assert run == [CODE["prompt"]]


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"text": "a b c"}], {"chat": True}, "is running text to be continued, which has no chat form"),
        ([MATHS], {"chat": True, "tokenizer": word_tokenizer()}, "has no chat template"),
        ([{"messages": TALK}], {"system": "w21"}, "sample '1' .* has a system message of its own"),
        ([{"messages": [*TALK[:2], TALK[1]]}], {}, "have the role 'user' where 'assistant' is due"),
        ([{"messages": TALK[2:]}], {}, "have the role 'assistant' where 'user' is due"),
        ([{"messages": TALK[:1]}], {}, "have no text of the user"),
        ([{"messages": ["w21"]}], {}, 'message 0 of line 1 .* is not {"role"'),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], {}, "message 0 of line 1 "),
    ],
)
def test_bad_chat_suites_are_one_line(
    tmp_path: Path, records: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_suite(put_lines(tmp_path / "a.jsonl", records), **options)
    assert "\n" not in str(error.value)


def test_a_system_message_needs_chat_form(tmp_path: Path) -> None:
    put_lines(tmp_path / "gsm8k_test.jsonl", [MATHS])
    with pytest.raises(UserError, match="'gsm8k' is not asked in chat form: give --chat with --system"):
        load_suite("gsm8k", tmp_path, system="w21")
    put(tmp_path / "a.txt", "a b c\n")
    with pytest.raises(UserError, match="no chat form"):
        load_suite(tmp_path / "a.txt", chat=True)
