"""docs/results.md and docs/results/: one index, a page a topic, commands that can be run."""

from __future__ import annotations

import csv
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
HEAD = subprocess.run(
    ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
).stdout.strip()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def was_tracked(name: str) -> bool:
    """Whether a commit of the history has this file; a shallow clone cannot tell, and says yes."""
    git = ["git", "-C", str(ROOT)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True)
    found = subprocess.run([*git, "log", "--format=%h", "-1", "--", name], capture_output=True, text=True)
    return bool(found.stdout.strip()) or shallow.stdout.strip() == "true"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes the pages, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("update_results")


def test_the_index_leads_to_every_page_and_every_page_back(script: Any) -> None:
    index = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    linked = re.findall(r"^\| \[([^]]+)\]\(results/([a-z]+)\.md\) \| [^|]+ \|$", index, re.MULTILINE)
    assert [name for _, name in linked] == list(script.TOPICS)
    assert {name for _, name in linked} == {page.stem for page in PAGES}
    assert len(index.splitlines()) < 40
    for title, name in linked:
        text = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# Results: {title}\n") and "](../results.md)" in text
        assert text.count(script.BEGIN) == text.count(script.END) == 1


def test_every_result_stands_on_one_page(script: Any) -> None:
    shown = [name for topic in script.TOPICS.values() for name in topic["titles"]]
    made = {path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.json")}
    assert len(shown) == len(set(shown)) and set(shown) == {
        name for name in made if not name.startswith(("pair/", "papers/"))
    }
    for name in shown:
        assert (RESULTS / f"{name}.md").is_file() != (RESULTS / f"{name}.csv").is_file()


def test_a_page_shows_one_result_and_links_the_data_of_each(script: Any) -> None:
    for topic, about in script.TOPICS.items():
        shown = script.tables(topic).partition("## All data")
        runs = script.records.published(topic)
        assert about["summary"] in {*about["titles"], *runs}
        assert len(re.findall(r"^\| ---", shown[0], re.MULTILINE)) >= 1
        links = re.findall(r"\[CSV\]\(([^)]+)\)", shown[2])
        assert len(links) == len(set(links)) == len(about["titles"]) + len(runs)
        assert all((ROOT / "docs" / "results" / link).is_file() for link in links)


def test_a_short_table_as_csv_keeps_every_cell_and_how_it_was_made(script: Any) -> None:
    name = "llamacpp/agreement"
    results = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    lines = script.script_csv(name, results).splitlines()
    assert (
        lines[0].startswith("# Run `python benchmarks/llamacpp/agreement.py`")
        and "commit 29ff045" in lines[0]
    )
    head, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    assert head[2] == "max |Δ log p|" and len(rows) == 5 and {len(row) for row in rows} == {len(head)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_benchmarks_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(r"\bbenchmarks/[\w/]+\.(?:py|md|json)\b", document.read_text(encoding="utf-8"))
    history = {"decisions", "results"} & {*document.relative_to(ROOT).parts}
    gone = [name for name in named if not (ROOT / name).is_file()]
    assert [name for name in gone if not history or not was_tracked(name)] == []


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda p: p.relative_to(RESULTS).as_posix()
)
def test_a_result_names_a_script_that_is_or_was_here(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"python (benchmarks/[\w/]+\.py)", text))
    assert [name for name in named if not (ROOT / name).is_file() and not was_tracked(name)] == []
    assert json.loads(text).get("smoke") is None, "a smoke run was kept"


def made(command: str = "python x.py", commit: str = HEAD, cpu: str = "EPYC") -> dict[str, Any]:
    environment = {"cpu": cpu, "cores": 2, "threads": 2, "gpu": None, "commit": commit}
    return {"command": command, "environment": environment}


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({"runs": {"a": made(), "b": made("python x.py --again")}}, "2 values of run"),
        ({"runs": {"a": made(), "b": made(cpu="Xeon")}}, "2 values of machine"),
        ({**made(), "again": [made(commit="0123456")]}, "2 values of commit"),
        ({**made(), "calls": 2}, "come from 2 calls"),
        ({**made(), "parts": {"a": {"commit": "0123456"}}}, "2 values of commit"),
        (made(commit=f"{HEAD}+"), "uncommitted changes"),
        ({**made(), "environment": {**made()["environment"], "dirty": True}}, "uncommitted changes"),
        (made(commit="0123456789ab"), "not in history"),
        (made(command="python x.py --data /srv/data"), "absolute path"),
        ({"rows": []}, "does not say"),
    ],
)
def test_results_that_are_not_of_one_run(script: Any, results: dict[str, Any], message: str) -> None:
    script.single_run(made())
    with pytest.raises(ValueError, match=message):
        script.single_run(results)


def test_lines_of_answers_come_from_commits_in_history(script: Any) -> None:
    with (RESULTS / "real" / "answers.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) > 100 and all(row["machine"] and row["command"] for row in rows)
    assert all(script.records.in_history(commit) for commit in {row["commit"] for row in rows})
