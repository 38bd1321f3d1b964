"""Labels of examples: records with messages or answers, prompts in chat form, answers that the models write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import fresh, tiny, word_tokenizer
from tests.training.labelling import words

import sprinter
from sprinter.errors import UserError
from sprinter.training.examples import Example, ExampleEncoder, read_examples
from sprinter.training.label_run import label
from sprinter.training.label_settings import LabelSettings
from sprinter.training.records import KINDS, Records, read_info, read_records

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w50', 'assistant': 'w51', 'system': 'w52'}[m.role] }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}w51{% endif %}"
)
ASK = [{"role": "user", "content": "w20 w21"}]
ANSWERED = [*ASK, {"role": "assistant", "content": "w22 w23"}]
SETTINGS = LabelSettings(new_tokens=6, batch_size=4, classes_per_prompt=4)


def chatting() -> sprinter.Pair:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return sprinter.load_pair(tiny("llama"), draft=fresh("gpt2"), tokenizer=tokenizer)


def put(file: Path, records: Sequence[Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def test_records_that_are_examples(tmp_path: Path) -> None:
    records = [
        {"messages": ASK},
        {"messages": ANSWERED},
        {"prompt": "a", "completion": " b"},
        {"question": "c?", "answer": "d"},
        {"prompt": "a"},
        {"text": "e", "answer": "f"},
        {"prompt": "a", "canonical_solution": "b"},
        {"question": "c?", "answer": ["d"]},
    ]
    file = put(tmp_path / "a.jsonl", records)
    found = list(read_examples([file]))
    assert [(one.prompt, one.answer) if isinstance(one, Example) else one for one in found] == [
        (ASK, None),
        (ASK, "w22 w23"),
        ("a", " b"),
        ("Question: c?\nAnswer:", " d"),
        "a",
        "e",
        ("a", "b"),
        "c?",
    ]
    chat = [one for one in read_examples([file], chat=True, system="s") if isinstance(one, Example)]
    first = {"role": "system", "content": "s"}
    assert [one.prompt for one in chat[:2]] == [[first, *ASK], [first, *ASK]]
    assert [(one.prompt[1], one.answer) for one in chat[2:6]] == [
        ({"role": "user", "content": "a"}, " b"),
        ({"role": "user", "content": "c?"}, "d"),
        ({"role": "user", "content": "a"}, None),
        ({"role": "user", "content": "e"}, None),
    ]


def test_an_answer_ends_with_the_end_of_its_turn(tmp_path: Path) -> None:
    pair = chatting()
    encode = ExampleEncoder(pair.models, 6)
    reason, ids, length = encode(Example(ASK, "w22 w23", "line 1"))
    assert (reason, length) == ("", 4)
    assert ids == [*pair.render_chat(ASK).ids, 22, 23, 0, 0, 0, 0]
    assert encode(Example(ASK, None, "line 1"))[1] == pair.render_chat(ASK).ids
    assert encode(Example([], "w22", "line 1"))[0] == "empty"
    assert encode(Example(words(92), "w22", "line 1"))[0] == "too_long"
    assert encode(Example("w20 " * 10**6, "w22", "line 1"))[0] == "too_long"
    assert ExampleEncoder(pair.models, 6, original=True)(Example(ASK, None, ""))[0] == "too_short"


def labelled(tmp_path: Path, records: Sequence[Any], settings: LabelSettings) -> Records:
    label(chatting(), [put(tmp_path / "a.jsonl", records)], tmp_path / "out", settings)
    return read_records(tmp_path / "out")


def test_labels_of_conversations(tmp_path: Path) -> None:
    records = labelled(tmp_path, [{"messages": ASK}, {"messages": ANSWERED}], SETTINGS)
    kinds = {
        (int(prompt), KINDS[int(kind)]) for prompt, kind in zip(records.prompt, records.kind, strict=True)
    }
    written = {"draft", "target", "interleaved"}
    assert kinds == {(0, kind) for kind in written} | {(1, kind) for kind in (*written, "original")}
    own = records.select((records.prompt == 1) & (records.kind == 0))
    assert own.token.tolist() == [22, 23, 0]  # the answer and the end, nothing after it
    assert own.position.tolist() == [4, 5, 6]
    info = read_info(tmp_path / "out")
    assert info.data[0]["examples"] == 2 and info.prompts == 2


def test_only_what_the_models_write_in_chat_form(tmp_path: Path) -> None:
    settings = LabelSettings(new_tokens=6, batch_size=4, chat=True, system="w9", classes=("target", "draft"))
    texts = [{"question": f"w{n}", "answer": "w22"} for n in range(20, 26)]
    records = labelled(tmp_path, texts, settings)
    first = dict(zip(records.prompt.tolist(), records.kind.tolist(), strict=True))
    assert [KINDS[kind] for kind in first.values()] == ["target", "draft"] * 3
    assert set(records.select(records.step == 0).position.tolist()) == {5}  # w52 w9 w50 w20 w51
    assert LabelSettings(**read_info(tmp_path / "out").settings) == settings


@pytest.mark.parametrize(
    ("records", "settings", "message"),
    [
        ([{"messages": [{"role": "user", "content": 3}]}], {}, "line 1 of .*: the content of message 0 is of type int"),
        ([{"messages": []}], {}, "field 'messages' of line 1 .* is not a list of messages"),
        ([{"messages": [{"role": "system", "content": "x"}, *ASK]}], {"chat": True, "system": "s"},
         "line 1 of .*: the messages have a system message already"),
        ([{"prompt": "w20"}], {"system": "s"}, "system goes with chat"),
        ([{"prompt": "w20"}], {"classes": ("targets",)}, "prefix class 'targets'"),
        ([{"prompt": "w20"}], {"classes": ()}, "not a list of different classes"),
        ([{"messages": ASK}], {"classes": ("original",)}, "1 too short"),
    ],
)  # fmt: skip
def test_bad_examples_are_one_line(
    tmp_path: Path, records: list[Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        labelled(tmp_path, records, LabelSettings(new_tokens=6, **settings))
    assert "\n" not in str(error.value)
