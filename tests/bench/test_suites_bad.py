"""Errors of suites are one line; data sets by name, with and without their package."""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bench.suite_files import COMMONSENSE, GSM8K, SPEC_BENCH, fill, numbered, put, put_lines, put_tar

from sprinter.bench.suites import load_suite
from sprinter.errors import UserError


def refused(*args: Any, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_suite(*args, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) > 20
    return message


def test_names_that_nobody_knows() -> None:
    assert "unknown suite 'spec_bench': did you mean 'spec-bench'?" in refused("spec_bench")
    assert "known: wiki-summary, lm1b" in refused("xyz")
    assert "there is no file 'none.jsonl'" in refused("none.jsonl")
    assert "is a directory" in refused("/")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    assert "is not a directory: give the one that holds lm1b_sample_dev.txt.gz" in refused(
        "lm1b", tmp_path / "no"
    )
    fill(tmp_path)
    (tmp_path / "mmlu_dev.tar.gz").unlink()
    (tmp_path / "wikipedia_en_2015_03.txt.gz").unlink()
    assert "lacks mmlu_dev.tar.gz of the suite 'mmlu'" in refused("mmlu", tmp_path)
    assert "lacks wikipedia_en_2015_03.txt.gz of the suite 'heldout'" in refused("heldout", tmp_path)


@pytest.mark.parametrize("limit", [0, -1, 2.5, True])
def test_limits(limit: Any) -> None:
    assert f"limit={limit} is out of range: give a whole number >= 1" in refused("lm1b", limit=limit)
    assert "new_tokens=-1" in refused("lm1b", new_tokens=-1)


def test_settings_that_do_not_belong(tmp_path: Path) -> None:
    fill(tmp_path)
    said = refused("gsm8k", tmp_path, rule="share=0.5")
    assert "has prompts of its own (Question: ... Answer:): leave the prompt rule away" in said
    assert "knows its fields: leave --field away" in refused("lm1b", tmp_path, field="text")
    assert "give the pair's tokenizer" in refused("lm1b", tmp_path, rule="long=8")
    said = refused("wiki-summary", tmp_path, rule="min_words=99")
    assert "all 3 texts of the suite 'wiki-summary' were passed over (3 too_short): change" in said
    assert 'for prompts as they are give a .jsonl file of {"prompt": ...}' in said


Spoil = Callable[[Path], object]

SPOILT: list[tuple[str, str, Spoil, str]] = [
    ("lm1b", "lm1b_sample_dev.txt.gz", lambda f: put(f, "\n \n"), "the suite 'lm1b' holds no text"),
    ("lm1b", "lm1b_sample_dev.txt.gz", lambda f: put(f, b"a\nb\xe9\n"), "not valid UTF-8 (byte 0xe9 in line 2)"),
    ("lm1b", "lm1b_sample_dev.txt.gz", lambda f: f.write_bytes(b"no gzip"), "cannot read"),
    ("lm1b", "lm1b_sample_dev.txt.gz", lambda f: f.write_bytes(f.read_bytes()[:-9]), "cannot read"),
    ("lm1b", "lm1b_sample_dev.txt.gz", lambda f: f.write_bytes(_scrambled()), "cannot read"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put(f, ""), "holds no text"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put(f, '{"turns"'), "is not JSON"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put(f, "[1]\n"), "is not an object with fields"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put_lines(f, [{}]), "line 1 of"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put_lines(f, [{"turns": [3]}]), "must be a text"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put_lines(f, [{"turns": 3}]), "must be a text"),
    ("spec-bench", "specbench_question.jsonl", lambda f: put_lines(f, SPEC_BENCH[:1] * 2), "called '81'"),
    ("mt-bench", "mtbench_reference_gpt4.jsonl", lambda f: put_lines(f, [{"a": 1}]), "no field 'question_id'"),
    ("gsm8k", "gsm8k_test.jsonl", lambda f: put_lines(f, [{**GSM8K, "answer": "5"}]), "end in '#### NUMBER'"),
    ("gsm8k", "gsm8k_test.jsonl", lambda f: put_lines(f, [{"answer": "#### 5"}]), "has no field 'question'"),
    ("humaneval", "humaneval.jsonl", lambda f: put_lines(f, [{"prompt": "x"}]), "has no field 'test'"),
    ("commonsenseqa", "commonsenseqa_dev.jsonl", lambda f: put_lines(f, [_unlabelled()]), "no field 'label'"),
    ("mmlu", "mmlu_test.tar.gz", lambda f: put(f, "no tar"), "fetch the file again"),
    ("mmlu", "mmlu_test.tar.gz", lambda f: f.write_bytes(f.read_bytes()[:-40]), "fetch the file again"),
    ("mmlu", "mmlu_test.tar.gz", lambda f: put_tar(f, {"x/a_test.csv": "q,a,b\n"}), "has 3 fields, not 6"),
    ("wikipedia", "wikipedia_en_2015_05.txt.gz", lambda f: put(f, '<doc id="1">\nx\n'), "within a <doc> block"),
    ("wikinews", "wikinews_en_2022_01.jsonl.gz", lambda f: put_lines(f, [{"text": "x"}]), "no field 'title'"),
]  # fmt: skip


def _scrambled() -> bytes:
    data = bytearray(gzip.compress(b"".join(b"%d\n" % (n * n) for n in range(5000))))
    data[200:260] = bytes(60)
    return bytes(data)


def _unlabelled() -> dict[str, Any]:
    return {**COMMONSENSE, "question": {"stem": "Where?", "choices": [{"text": "bank"}]}}


@pytest.mark.parametrize(("suite", "file", "spoil", "said"), SPOILT)
def test_spoilt_files(tmp_path: Path, suite: str, file: str, spoil: Spoil, said: str) -> None:
    fill(tmp_path)
    assert load_suite(suite, tmp_path).samples
    spoil(tmp_path / file)
    assert said in refused(suite, tmp_path)


def test_a_record_without_the_field(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", json.dumps({"text": numbered(20)}) + '\n{"id": 1}\n')
    assert "line 2 of" in refused(tmp_path / "a.jsonl") and "none of the fields" in refused(
        tmp_path / "a.jsonl"
    )
    assert "has no field 'body', only text" in refused(tmp_path / "a.jsonl", field="body")


# --- data sets by name -----------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def served(monkeypatch: pytest.MonkeyPatch, sets: dict[str, Rows]) -> list[tuple[str, dict[str, Any]]]:
    """In place of the datasets package: named sets; returns what it was asked."""
    asked: list[tuple[str, dict[str, Any]]] = []

    def load_dataset(path: str, **options: Any) -> Iterator[dict[str, Any]]:
        asked.append((path, options))
        known = options.get("data_files", path)
        if known not in sets:
            raise ConnectionError("no network\nat all")
        return iter(sets[known])

    fake: Any = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return asked


def test_without_data_suites_come_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mmlu = [{"subject": "us_law", "question": "Q?", "choices": ["w", "x", "y", "z"], "answer": 2}]
    articles = [{"id": str(n), "text": numbered(70)} for n in (12, 61_001)]
    asked = served(
        monkeypatch,
        {
            "jordiclive/wikipedia-summary-dataset": [{"summary": numbered(20), "full_text": "x"}] * 3,
            "cais/mmlu": mmlu,
            "wikimedia/wikipedia": articles,
        },
    )
    suite = load_suite("wiki-summary", limit=2)
    assert [s.turns for s in suite.samples] == [(numbered(6),)] * 2
    (source,) = suite.sources
    assert source["name"] == "jordiclive/wikipedia-summary-dataset@train" and len(source["sha256"]) == 64
    (sample,) = load_suite("mmlu").samples
    assert sample.turns[0].count("Answer: C") == 1 and sample.check and sample.check.answer == "C"
    assert asked[1:] == [
        ("cais/mmlu", {"split": split, "streaming": True, "name": "all"}) for split in ("dev", "test")
    ]
    assert [s.id for s in load_suite("wikipedia").samples] == ["61001.0"], "no article of the training text"


def test_any_data_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, {"org/set": [{"prompt": "Hi", "id": 3}]})
    suite = load_suite("org/set@test")
    assert (suite.name, suite.samples[0].id, suite.samples[0].turns) == ("org/set@test", "3", ("Hi",))
    assert suite.sources[0]["name"] == "org/set@test"


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    served(monkeypatch, {})
    said = refused("spec-bench")
    assert "no network" in said and said.endswith(
        "or give --data, the directory that holds specbench_question.jsonl"
    )


def test_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = None
    monkeypatch.setitem(sys.modules, "datasets", nothing)
    said = refused("lm1b")
    assert "needs the package datasets: pip install datasets, or give --data, the directory that" in said


def test_checks_of_own_records(tmp_path: Path) -> None:
    """How an answer is checked is asked for; a number after #### needs no asking."""
    file = tmp_path / "own.jsonl"
    records = [
        {"prompt": "a", "answer": "Paris", "check": "text"}, {"prompt": "b", "answer": "It is 5.", "check": "number"},
        {"prompt": "c", "answer": "2 + 2\n#### 4"}, {"prompt": "d", "answer": "Rome"},
    ]  # fmt: skip
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    found = [sample.check for sample in load_suite(str(file)).samples]
    assert [check and (check.kind, check.answer) for check in found] == [
        ("text", "Paris"), ("number", "It is 5."), ("number", "4"), None,
    ]  # fmt: skip
    file.write_text(json.dumps({"prompt": "a", "answer": "B", "check": "guess"}) + "\n")
    assert "'guess': give number, choice or text" in refused(str(file))
    file.write_text(json.dumps({"prompt": "a", "check": "text"}) + "\n")
    assert 'give the record an "answer"' in refused(str(file))
