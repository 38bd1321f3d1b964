"""Prompts: the rule that splits texts, the sources, and errors."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import VOCAB, word_tokenizer
from tests.training.labelling import tiny_pair, words

from sprinter.errors import UserError
from sprinter.training.examples import read_examples
from sprinter.training.prompts import Prompt, PromptRule, PromptSplitter
from sprinter.training.sources import SPLITS, survey


def cut(texts: list[str], **changes: int | float) -> tuple[list[Prompt], dict[str, int]]:
    rule = {"share": 0.3, "prompt_tokens": 8, "new_tokens": 4, "context": 96} | changes
    cutter = PromptSplitter(PromptRule(**rule), word_tokenizer(), VOCAB)  # type: ignore[arg-type]
    return list(cutter(texts)), cutter.skipped


def ids(text: str) -> tuple[int, ...]:
    return tuple(word_tokenizer()(text)["input_ids"])


@pytest.mark.parametrize(("count", "length"), [(20, 6), (23, 6), (26, 7), (27, 8), (60, 8), (7, 2), (5, 1)])
def test_the_prompt_is_the_share_of_the_words_and_the_original_goes_on(count: int, length: int) -> None:
    text = words(count)
    (prompt,), skipped = cut([text])
    assert (prompt.ids, prompt.original) == (ids(text)[:length], ids(text)[length : length + 4])
    assert sum(skipped.values()) == 0


def test_texts_that_cannot_be_used_are_counted_and_keep_their_numbers() -> None:
    texts = [words(4), "", words(30), " \n", words(3), words(30, 1)]
    prompts, skipped = cut(texts)
    assert [prompt.index for prompt in prompts] == [2, 5]
    assert skipped == {"too_long": 0, "too_short": 2, "empty": 2}


def test_without_a_cut_long_prompts_are_skipped() -> None:
    prompts, skipped = cut([words(200), words(310), words(1000)], prompt_tokens=0)
    assert [len(prompt.ids) for prompt in prompts] == [60]
    assert skipped["too_long"] == 2
    assert len(cut([words(310)], prompt_tokens=92)[0][0].ids) == 92
    assert cut([words(310)], prompt_tokens=93)[1]["too_long"] == 1, "93 + 4 tokens do not fit in 96"


def test_a_word_of_many_tokens() -> None:
    """The share is of words, the bounds are in tokens."""
    from tests.cli.tiny import tiny_tokenizer  # one token per byte

    cutter = PromptSplitter(PromptRule(0.5, 5, 4, 96), tiny_tokenizer(), 256)
    long, spaced, short = cutter(["abcdefghij klmnop", "  ab  cd\tef gh", "ab cdef"])
    assert (len(long.ids), len(long.original)) == (5, 4)
    assert (len(spaced.ids), len(short.ids)) == (5, 2)


def test_only_the_beginning_of_a_long_text_is_encoded() -> None:
    class Counting:
        seen = 0

        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            self.seen += len(text)
            return {"input_ids": [1] * len(text.split())}

    counting: Any = Counting()
    texts = ["word " * 50_000, "x" * 1_000_000, "x" * 500_000 + " y" * 1000]
    list(PromptSplitter(PromptRule(0.3, 128, 20, 1024), counting, VOCAB)(texts))
    assert counting.seen < 20_000


def test_a_tokenizer_of_another_model_is_refused() -> None:
    cutter = PromptSplitter(PromptRule(0.3, 8, 4, 96), word_tokenizer(), 10)
    with pytest.raises(UserError, match="common vocabulary has 10 tokens"):
        list(cutter(["w59 " * 20]))


# --- sources ---------------------------------------------------------------------------------------------------------


def read_texts(sources: list[str], field: str | None = None, split: str = "lines") -> Iterator[Any]:
    return (one if isinstance(one, str) else one.prompt for one in read_examples(sources, field, split))


def put(path: Path, content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return str(path)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_lines_and_blocks(tmp_path: Path, name: str) -> None:
    lines = put(tmp_path / name, "\ufeffone\n\n two \r\nthrée <doc >\n")
    assert list(read_texts([lines])) == ["one", " two ", "thrée <doc >"]
    blocks = put(
        tmp_path / name, '\n<doc id="1" title="A">\nA\n\nOf A.\n</doc>\nbetween\n<doc id="2">\n</doc>\n'
    )
    assert list(read_texts([blocks])) == ["A\n\nOf A.", ""]
    assert survey([lines, blocks], read_examples)[0]["texts"] == 2


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_wrapped_text_is_split_as_requested(tmp_path: Path, name: str) -> None:
    file = put(tmp_path / name, "\n one\ntwo\n\n \nthree\nfour\n\n")
    assert list(read_texts([file])) == [" one", "two", "three", "four"]
    assert list(read_texts([file], split="blank-lines")) == [" one\ntwo", "three\nfour"]
    assert list(read_texts([file], split="file")) == [" one\ntwo\n\n \nthree\nfour"]
    assert [survey([file], partial(read_examples, split=split))[0]["texts"] for split in SPLITS] == [4, 2, 1]


RECORDS = [
    ({"text": "a", "prompt": "b"}, None, "a"),
    ({"prompt": "b", "question": "c"}, None, "b"),
    ({"question": "c"}, None, "c"),
    ({"turns": ["d", "e"]}, None, "d"),
    ({"turns": []}, None, ""),
    ({"text": None}, None, ""),
    ({"text": "a", "answer": "f"}, "answer", "f"),
    ({"question": {"stem": "g"}}, "question.stem", "g"),
]


@pytest.mark.parametrize(("record", "field", "text"), RECORDS)
def test_fields_of_records(tmp_path: Path, record: dict[str, Any], field: str | None, text: str) -> None:
    file = put(tmp_path / "a.jsonl", "\n" + json.dumps(record) + "\n")
    assert list(read_texts([file], field)) == [text]


def parquet(path: Path, columns: dict[str, list[Any]]) -> str:
    arrow = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    return str(path)


def test_parquet(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", {"id": [1, 2], "question": ["a", "b"], "turns": [["c"], ["d"]]})
    assert list(read_texts([file])) == ["a", "b"]
    assert list(read_texts([file], "turns")) == ["c", "d"]
    with pytest.raises(UserError, match="no field 'answer', only id, question, turns: name the text's field"):
        list(read_texts([file], "answer"))


def test_data_sets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, split: str, streaming: bool) -> Iterator[dict[str, str]]:
        asked.append((name, split, streaming))
        if name == "org/none":
            raise ConnectionError("no network\nat all")
        return iter([{"text": "a"}, {"text": "b"}])

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    assert list(read_texts(["org/name@validation"])) == ["a", "b"]
    (found,) = survey(["name"], read_examples)
    assert found == {"name": "name", "sha256": hashlib.sha256(b"a\0b\0").hexdigest(), "texts": 2}
    assert asked == [("org/name", "validation", True), ("name", "train", True)]
    with pytest.raises(UserError, match=r"cannot load data set 'org/none' \(no network\): check"):
        list(read_texts(["org/none"]))


def test_sources_are_read_one_after_another_and_no_further_than_asked(tmp_path: Path) -> None:
    good, bad = put(tmp_path / "a.txt", "one\ntwo\n"), put(tmp_path / "b.txt", b"three\n\xff\n")
    texts = read_texts([good, bad])
    assert [next(texts) for _ in range(3)] == ["one", "two", "three"]
    assert [found["texts"] for found in survey([good, good, bad], read_examples, 3)] == [2, 1, 0]


def bad_files(folder: Path) -> list[tuple[str, str]]:
    """(source, words of the line)."""
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"one\n" * 5000)[:-20])
    (folder / "false.txt.gz").write_bytes(b"no gzip")
    return [
        (put(folder / "empty.txt", ""), "holds no text"),
        (put(folder / "blank.txt.gz", "\n \n"), "holds no text"),
        (put(folder / "empty.jsonl", ""), "holds no text"),
        (put(folder / "latin.txt", "ok\ncaf\xe9\n".encode("latin-1")), "not valid UTF-8 (byte 0xe9 in line 2)"),
        (put(folder / "plain.txt.gz", "x").replace("plain", "missing"), "there is no file"),
        (str(folder / "cut.txt.gz"), "cannot read"),
        (str(folder / "false.txt.gz"), "cannot read"),
        (put(folder / "open.txt", "<doc id=1>\nx\n"), "ends within a <doc> block"),
        (put(folder / "a.csv", "x"), "is of no known kind: give one that ends in .txt, .txt.gz"),
        (str(folder), "is a directory"),
        (put(folder / "a.jsonl", '{"text": "x"}\n{"text"\n'), "line 2 of"),
        (put(folder / "list.jsonl", "[1]\n"), "is not an object with fields"),
        (put(folder / "other.jsonl", '{"id": 1}\n'), "none of the fields text, prompt, question"),
        (put(folder / "number.jsonl", '{"text": 3}\n'), "field 'text' of line 1"),
        (put(folder / "false.parquet", "no"), "give a Parquet file"),
        (f"{folder}/nothing", "there is no file"),
        ("", "there is no file"),
    ]  # fmt: skip


def test_bad_sources_are_refused_in_one_line(tmp_path: Path) -> None:
    for source, said in bad_files(tmp_path):
        with pytest.raises(UserError) as caught:
            survey([source], read_examples)
        assert said in str(caught.value) and "\n" not in str(caught.value), (source, str(caught.value))


@pytest.mark.parametrize(
    ("missing", "source", "said"),
    [
        (
            "datasets",
            lambda folder: "org/name",
            "there is no file 'org/name'; reading it as a data set's name needs",
        ),
        (
            "pyarrow.parquet",
            lambda folder: parquet(folder / "a.parquet", {"text": ["a"]}),
            "pip install pyarrow",
        ),
    ],
)
def test_packages_that_are_not_installed(
    missing: str, source: Callable[[Path], str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = source(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="pip install") as caught:
        list(read_texts([place]))
    assert said in str(caught.value)


def test_one_line_is_enough_for_the_pair(tmp_path: Path) -> None:
    file = put(tmp_path / "one.txt", words(40))
    cutter = PromptSplitter(PromptRule(0.3, 8, 4, tiny_pair().models.context), word_tokenizer(), VOCAB)
    assert len(list(cutter(read_texts([file])))) == 1
