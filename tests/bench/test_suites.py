"""Named suites over small files in their own formats: samples, references, checks, order, sources."""

from __future__ import annotations

import hashlib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests.bench.suite_files import COMMONSENSE, HUMANEVAL, fill, numbered, put, put_lines, question

from sprinter.bench.sample import Sample, SampleCheck, Suite
from sprinter.bench.suites import Entry, TextRule, group_of_spec_bench, load_suite, suite_names
from sprinter.bench.suites.table import SUITES
from sprinter.decode import registry
from sprinter.decode.registry import Registry
from sprinter.errors import SprinterError

NAMES = (
    "wiki-summary", "lm1b", "heldout", "wikipedia", "wikinews", "tinystories", "spec-bench", "mt-bench", "vicuna",
    "gsm8k", "humaneval", "commonsenseqa", "mmlu",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("data"))


def test_the_list_names_and_describes_all() -> None:
    assert tuple(suite_names()) == NAMES
    assert all(about and "\n" not in about for about in suite_names().values())


@pytest.mark.parametrize("name", NAMES)
def test_every_suite_loads_and_says_where_it_comes_from(data: Path, name: str) -> None:
    suite = load_suite(name, data)
    assert suite.name == name and suite.samples and suite.new_tokens > 0 and suite.rule
    assert len({sample.id for sample in suite.samples}) == len(suite.samples)
    for source in suite.sources:
        assert source["sha256"] == hashlib.sha256((data / source["name"]).read_bytes()).hexdigest()
    for sample in suite.samples:
        assert sample.turns and all(sample.turns)
        assert len(sample.references) in (0, len(sample.turns))


def test_running_text_is_cut_after_30_per_cent_of_its_words(data: Path) -> None:
    suite = load_suite("wiki-summary", data)
    assert suite.samples[0] == Sample(
        "1", "wiki-summary", (numbered(6),), (numbered(20).removeprefix(numbered(6)).strip(),)
    )
    assert [len(sample.turns[0].split()) for sample in suite.samples] == [6, 9]
    assert (suite.new_tokens, suite.skipped) == (20, {"too_short": 1})
    assert suite.rule == "first 30 % of the words, of texts of 10 words or more"


def test_rules_may_be_changed(data: Path) -> None:
    def lengths(name: str, rule: str | TextRule) -> list[int]:
        return [len(sample.turns[0].split()) for sample in load_suite(name, data, rule=rule).samples]

    assert lengths("wiki-summary", "share=0.5, min_words=5") == [10, 4, 16]
    assert lengths("wiki-summary", TextRule(words=7)) == [6, 7]
    # a change leaves the rest of the suite's own rule as it is; a whole rule does not
    assert set(lengths("wikipedia", "share=0.5")) == {51, 40}
    assert all(n > 100 for n in lengths("wikipedia", "whole"))
    assert load_suite("wiki-summary", data, new_tokens=0).new_tokens == 0


def by_id(suite: Suite) -> dict[str, Sample]:
    return {sample.id: sample for sample in suite.samples}


def test_spec_bench_keeps_categories_references_and_answers(data: Path) -> None:
    samples = by_id(load_suite("spec-bench", data))
    assert samples["81"] == Sample("81", "writing", ("Write.", "Again."))
    assert samples["101"].references == ("Ann.", "") and samples["101"].check is None
    assert samples["481"].references == ("first",)
    maths = samples["401"]
    assert maths.check == SampleCheck("number", "1000") and maths.references == ("500*2=1000\n#### 1,000",)


def test_spec_bench_takes_evenly_from_its_six_groups(data: Path) -> None:
    whole = load_suite("spec-bench", data)
    groups = [group_of_spec_bench(sample.category) for sample in whole.samples]
    six = ["mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"]
    assert groups == [*six, "mt_bench", "translation", "mt_bench"]
    assert [s.category for s in whole.samples if s.id in ("81", "82", "101")] == [
        "writing", "reasoning", "writing",
    ]  # fmt: skip
    for limit in (1, 6, 8, 100):
        part = load_suite("spec-bench", data, limit=limit)
        assert part.samples == whole.samples[:limit] and part.sources == whole.sources


def test_mt_bench_prefers_the_answers_of_gpt_4(data: Path) -> None:
    samples = by_id(load_suite("mt-bench", data))
    assert samples["101"].references == ("It is Ann.", "Bob.") and samples["81"].references == ()


def test_gsm8k(data: Path) -> None:
    first, second = load_suite("gsm8k", data).samples
    assert first == Sample(
        "0",
        "gsm8k",
        ("Question: Ann has 2 and 3. How many?\nAnswer:",),
        ("2+3=5\n#### 5",),
        SampleCheck("number", "5"),
    )
    assert second.check == SampleCheck("number", "-1234.5")


def test_humaneval_is_asked_as_it_is(data: Path) -> None:
    (sample,) = load_suite("humaneval", data).samples
    assert sample.turns == (HUMANEVAL["prompt"],) and sample.references == (HUMANEVAL["canonical_solution"],)
    assert sample.check == SampleCheck("code", HUMANEVAL["test"], "one")


def test_commonsenseqa(data: Path, tmp_path: Path) -> None:
    (sample,) = load_suite("commonsenseqa", data).samples
    assert sample.turns == ("Question: Where do dogs sleep?\nA. bank\nB. kennel\nAnswer:",)
    assert sample.check == SampleCheck("choice", "B")
    flat = {
        "id": "a7",
        "answerKey": "B",
        "question": "Where do dogs sleep?",
        "choices": {"label": ["A", "B"], "text": ["bank", "kennel"]},
    }
    put_lines(tmp_path / "commonsenseqa_dev.jsonl", [flat])
    assert load_suite("commonsenseqa", tmp_path).samples == (sample,), "the hub's copy is laid out otherwise"
    assert COMMONSENSE["id"] == sample.id


def test_mmlu_shows_up_to_five_solved_questions_of_the_subject(data: Path) -> None:
    suite = load_suite("mmlu", data)
    assert [sample.id for sample in suite.samples[:3]] == ["algebra/0", "us_law/0", "algebra/1"]
    algebra, law = suite.samples[0], suite.samples[3]
    title = "The following are multiple choice questions (with answers) about {}."
    asked = "What, {}?\nA. a\nB. b\nb\nC. c\nD. d\nAnswer:"
    assert algebra.turns == (f"{title.format('algebra')}\n\n{asked.format(0)}",), "no solved ones there"
    solved = "".join(f"{asked.format(n)} {'ABCDA'[n]}\n\n" for n in range(5))
    assert law.turns == (f"{title.format('us law')}\n\n{solved}{asked.format(1)}",)
    assert law.check == SampleCheck("choice", "B") and law.category == "us_law"


def test_held_out_paragraphs_alone_first_ones_first(data: Path) -> None:
    suite = load_suite("heldout", data)
    ids = [sample.id for sample in suite.samples]
    firsts = [f"wikipedia/{10 * n}.0" for n in range(6)] + ["wikinews/0.0", "wikinews/1.0"]
    assert ids == [*firsts, *(f"wikipedia/{10 * n}.1" for n in range(6))]
    assert suite.samples[6].turns == (numbered(30),) and suite.samples[6].category == "wikinews"
    assert suite.samples[0].references[0].endswith("0 (1 May)")
    assert {s.id for s in load_suite("wikinews", data).samples} == set(firsts[6:])
    assert "& more" in suite.samples[6].references[0] and "()" not in suite.samples[6].references[0]
    assert [s.id for s in load_suite("tinystories", data).samples] == ["tinystories/1"]


# --- files of the user's ---------------------------------------------------------------------------------------------


def test_a_text_file_is_running_text(tmp_path: Path) -> None:
    file = put(tmp_path / "a.b.txt.gz", f"{numbered(20)}\n{numbered(30)}\n{numbered(40)}\n")
    suite = load_suite(file, limit=2)
    assert suite.name == "a.b" and [s.id for s in suite.samples] == ["1", "2"]
    assert suite.sources == ({"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},)
    assert load_suite("a.b.txt.gz", tmp_path).name == "a.b", "files are looked for under --data too"


def test_records_are_prompts_or_running_text_by_their_field(tmp_path: Path) -> None:
    talk = question(5, "b", ["One?", "Two?"], reference=["1", "2"])
    put_lines(tmp_path / "turns.jsonl", [question(4, "a", ["Zero?"]), question(6, "a", ["Six?"]), talk])
    suite = load_suite(tmp_path / "turns.jsonl")
    assert [s.id for s in suite.samples] == ["4", "5", "6"], "a category after another"
    assert suite.samples[1] == Sample("5", "b", ("One?", "Two?"), ("1", "2"))
    put_lines(tmp_path / "prompts.jsonl", [{"prompt": "Go on:", "id": 0}, {"prompt": ["Why?", "So?"]}])
    assert [(s.id, s.turns) for s in load_suite(tmp_path / "prompts.jsonl").samples] == [
        ("0", ("Go on:",)),
        ("2", ("Why?", "So?")),
    ]
    put_lines(tmp_path / "texts.jsonl", [{"meta": {"body": numbered(10)}, "text": numbered(20)}])
    assert load_suite(tmp_path / "texts.jsonl").samples[0].turns == (numbered(6),)
    assert load_suite(tmp_path / "texts.jsonl", field="meta.body").samples[0].turns == (numbered(3),)
    assert load_suite(tmp_path / "texts.jsonl", rule="whole").samples[0].turns == (numbered(20),)
    long = load_suite(tmp_path / "prompts.jsonl", limit=1, rule="share=0.5,min_words=2")
    assert long.samples[0].turns == ("Go",) and long.samples[0].references == ("on:",)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    table = arrow.table({"id": [7], "turns": [["a", "b"]], "category": ["c"]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    assert load_suite(tmp_path / "a.parquet").samples == (Sample("7", "c", ("a", "b")),)


# --- suites of other packages ----------------------------------------------------------------------------------------


def extra() -> Entry:
    """What a plug-in gives."""
    return Entry("one sample", (), lambda rows, making: [Sample("a", making.name, ("Hi",))], 8, "as it is")


def test_other_packages_may_add_suites(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("extra", f"{__name__}:extra", SUITES._group)]
    monkeypatch.setattr(
        registry, "entry_points", lambda group: points if group == "sprinter.bench_suites" else []
    )
    monkeypatch.setattr(EntryPoint, "load", lambda self: extra)
    fresh = Registry("suite", SUITES._group)
    monkeypatch.setattr("sprinter.bench.suites.load.SUITES", fresh)
    assert suite_names() == {"extra": "one sample"}
    assert load_suite("extra").samples[0].turns == ("Hi",) and load_suite("extra").new_tokens == 8


def test_a_suite_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Registry("suite", "none")
    fresh.add("odd", lambda: 3)
    monkeypatch.setattr("sprinter.bench.suites.load.SUITES", fresh)
    with pytest.raises(SprinterError, match="'odd' gives int, no Entry"):
        load_suite("odd")
