"""``sprinter reproduce``: every paper runs on the built-in pair, goes on where it stopped, and refuses in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from benchmarks.smoke import made_up_data
from tests.cli.conftest import run
from tests.cli.tiny import Run

import sprinter
from sprinter.bench.quality.rouge import ROUGE
from sprinter.errors import UserError
from sprinter.reproduce import papers
from sprinter.reproduce.answers import Answers
from sprinter.reproduce.fsd import drawn_or_greedy
from sprinter.reproduce.papers import PAPERS
from sprinter.reproduce.settings import ReproduceSettings
from sprinter.reproduce.study import Study

__all__ = ["run"]  # the fixture

TINY = (
    "--prompts",
    "2",
    "--tuning-prompts",
    "1",
    "--gate-texts",
    "120",
    "--max-new-tokens",
    "6",
    "--repeats",
    "1",
)


@pytest.fixture
def few_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws along three texts a data set, where they are of 20 however few prompts are asked for."""
    for module in ("fsd", "svip"):
        monkeypatch.setattr(f"sprinter.reproduce.{module}.ENOUGH", 3)


def read(folder: Path, paper: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{paper}.json").read_text(encoding="utf-8")))


@pytest.mark.usefixtures("few_laws")
@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_on_the_built_in_pair(paper: str, run: Run, tmp_path: Path) -> None:
    command = ("reproduce", paper, "--data", str(made_up_data()), "--out", str(tmp_path), *TINY, "--json")
    status, out, err = run(*command)
    assert status == 0, err
    results = json.loads(out)
    assert list(results["parts"]) == list(PAPERS[paper].parts)
    tables = [table for part in results["parts"].values() for table in part]
    assert len({table["title"] for table in tables}) == len(tables)
    assert all(0 < table["prompts"] < 20 for table in tables if table["title"] != "Figure 8")
    for table in tables:
        assert table["rows"] and all(len(row) == len(table["head"]) for row in table["rows"]), table["title"]
    if paper == "svip":  # every group of Spec-Bench has its column
        assert tables[0]["head"][2:-3] == ["MT-Bench", "Trans.", "Sum.", "QA", "Math", "RAG"]
    claims = [claim for table in tables for claim in table["claims"]]
    assert len(results["verdicts"]) == len(claims) > 1
    page = (tmp_path / f"{paper}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {PAPERS[paper].title}, measured again\n") and "**A trial: " in page
    lines = " ".join(page.split())
    assert all(" ".join(claim["says"].split()) in lines for claim in claims)
    assert papers.BUILTIN in lines
    assert all(len(line) <= 120 for line in page.splitlines() if not line.startswith("|"))
    assert page == papers.page(results, paper) + "\n"  # all of it is in the JSON
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == set(re.findall(r"!\[[^]]+\]\((.+?)\)", page))
    assert pictures == ({"sprinter-roc.png"} if paper == "sprinter" else set())
    again = run(
        *command
    )  # every answer is there: the same rows give the same tables, measured times included
    redrawn = read(tmp_path, paper)
    assert again[0] == 0 and redrawn["parts"] == results["parts"]
    made = results["environment"]  # it is that of the answers
    assert redrawn["environment"] == made | {"commit_of_tables": made["commit"]} and redrawn["calls"] == 1
    if paper == "sprinter":
        table = next(table for table in tables if table["title"] == "Table 2, temperature 1")
        flops = [float(cell) for row in table["rows"] for cell in row[-2:]]
        assert len({*flops}) > len(flops) / 2, flops  # rounded to 0.1 GFLOPs, a small pair's would be equal
        # no gate is judged on its own texts:
        trained, judged = re.findall(r"(\d+) and (\d+) (?:texts|prompts that it was not trained on)", lines)[
            :2
        ]
        assert all(0 < int(few) < 0.3 * int(all_) for few, all_ in zip(judged, trained, strict=True))


@pytest.mark.usefixtures("few_laws")
def test_fsd_on_one_data_set(run: Run, tmp_path: Path) -> None:
    command = (
        "reproduce",
        "fsd",
        "--data",
        str(made_up_data()),
        "--out",
        str(tmp_path),
        *TINY,
        "--suite",
        "mmlu",
    )
    status, _, err = run(*command)
    assert status == 0, err
    results = read(tmp_path, "fsd")
    tables = [table for part in results["parts"].values() for table in part]
    assert results["settings"]["suites"] == ["mmlu"]
    assert all(row[0] == "MMLU" for table in tables for row in table["rows"]), tables
    told = [claim for table in tables for claim in table["claims"] if "only one side" in claim["missing"]]
    assert len(told) == 1 and told[0]["verdict"] == "not testable here"
    (one,) = results["parts"]["one-threshold"]  # of one data set it is no other than its own
    assert {claim["verdict"] for claim in one["claims"]} == {"not testable here"}


def test_one_part_and_its_pair(run: Run, tmp_path: Path) -> None:
    part = ("--part", "table-2", "--data", str(made_up_data()), "--out", str(tmp_path))
    status, _, err = run("reproduce", "yin", *part, *TINY)
    assert status == 0 and "note: a trial, of fewer than 20 prompts: Table 2" in err, err
    results = read(tmp_path, "yin")
    assert list(results["parts"]) == ["table-2"] and results["settings"]["repeats"] == 1
    assert "Vicuna-bench, an answer each, 6 new tokens" in results["parts"]["table-2"][0]["measured"]
    assert {"target", "draft"} <= results["pair"].keys()
    status, _, err = run("reproduce", "yin", *part, *TINY, "--prompts", "3")
    assert status == 2 and "--restart" in err  # another run lies there


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("spinter",), "sprinter"),
        (("svip", "--part", "long-gredy"), "long-greedy"),
        (("yin", "--prompts", "0"), "prompts"),
        (("yin", "--suite", "mmlu"), "yin needs all of its prompts"),
        (("fsd", "--suite", "mmul"), "did you mean 'mmlu'"),
        (("yin", "--data", "nowhere"), "nowhere"),
        (("fsd", "--target", str(sprinter.builtin_paths()["target"])), "this pair has none: give --draft"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], told: str, run: Run, tmp_path: Path) -> None:
    status, out, err = run("reproduce", *arguments, "--out", str(tmp_path))
    assert (status, out) == (2, "") and told in err and err.strip().count("\n") <= 1


def test_a_suite_without_enough_prompts_is_refused(tmp_path: Path) -> None:
    pair = sprinter.load_pair(prefix_cache_bytes=0)
    study = Study(pair, made_up_data(), tmp_path, ReproduceSettings(), PAPERS["svip"].usual)
    assert len(study.suite("mt-bench", 2, 1).samples) == 2
    with pytest.raises(UserError, match="no prompt that fits after the first 999"):
        study.suite("mt-bench", 2, 999)


def test_tables_of_laws_alone_are_a_trial_too_and_a_second_call_is_told(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    command = ("reproduce", "svip", "--data", str(made_up_data()), "--out", str(folder), *TINY)
    assert run(*command, "--part", "signals")[0] == 0
    results = read(folder, "svip")
    assert [table["prompts"] for table in results["parts"]["signals"]] == [11] and results["calls"] == 1
    for repeats, calls in (("1", 1), ("1", 1), ("2", 2)):  # the second asks nothing, the third one more
        assert run(*command, "--part", "spec-bench", "--repeats", repeats)[0] == 0
        assert read(folder, "svip")["calls"] == calls
    assert "in the last of 2 calls" in " ".join((folder / "svip.md").read_text(encoding="utf-8").split())


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder, told in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "below", "cannot write")):
        command = (
            "reproduce",
            "svip",
            "--data",
            str(made_up_data()),
            "--part",
            "signals",
            "--out",
            str(folder),
        )
        status, _, err = run(*command, *TINY)
        assert status == 2 and told in err and "laws along texts" not in err


@pytest.mark.parametrize(("prompts", "asked"), [(1, 1), (8, 8), (20, 20), (100, 20)])
def test_long_texts_are_as_many_as_the_prompts_up_to_what_a_table_needs(prompts: int, asked: int) -> None:
    counts: list[int] = []

    class Enough(Exception):
        pass

    def suite(name: str, count: int, *_: int, **__: int) -> None:
        counts.append(count)
        raise Enough

    models = SimpleNamespace(context=1024)
    study = SimpleNamespace(
        prompts=prompts,
        tuning=1,
        new_tokens=32,
        pair=SimpleNamespace(models=models),
        suite=suite,
        once=lambda key, make: {},
    )
    with pytest.raises(Enough):
        PAPERS["svip"].parts["long"](cast(Study, study))
    assert counts == [asked]


@pytest.mark.parametrize(("suites", "told"), [((), True), (("humaneval", "mmlu"), True), (("mmlu",), False)])
def test_humaneval_is_spoken_of_where_it_is_measured(suites: tuple[str, ...], told: bool) -> None:
    study = SimpleNamespace(chats=True, suites=suites)
    assert ("HumanEval" in drawn_or_greedy(cast(Study, study))) == told


@pytest.mark.parametrize(("trusted", "testable"), [(0, False), (1, False), (2, True), (20, True)])
def test_a_gate_that_trusts_next_to_nothing_proves_no_quality(trusted: int, testable: bool) -> None:
    def answers(count: int) -> Answers:
        quality = {"log_likelihood": -40.0, "log_likelihood_per_token": -2.0} | dict.fromkeys(ROUGE, 0.2)
        row = {
            "suite": "lm1b",
            "repeat": 0,
            "choices": [{"new_tokens": [20]}],
            "origins": {"trusted": count} if count else {},
            "quality": quality,
            "drift_sum": 0.0,
            "drift_tokens": 20,
        }
        return Answers("sprinter", [{**row, "question_id": str(n)} for n in range(8)])

    found = {"SD": answers(0), "MentoredDec": answers(0), "SPRINTER": answers(trusted)}
    study = SimpleNamespace(once=lambda key, make: found)
    (table,) = PAPERS["sprinter"].parts["quality"](cast(Study, study))
    verdicts = {table.verdict(claim) for claim in table.claims}
    assert verdicts == {"held" if testable else "not testable here"}
