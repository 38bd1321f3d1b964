"""docs/results.md and docs/results/: one index, a page a topic, commands that can be run."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that writes the pages, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("update_results")


def test_the_index_leads_to_every_page_and_every_page_back(script: Any) -> None:
    index = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    linked = re.findall(
        r"^\| \[([^]]+)\]\(results/([a-z]+)\.md\) \| [^|]+ \| [^|]*\d[^|]* \|$", index, re.MULTILINE
    )
    assert [name for _, name in linked] == list(script.TOPICS)
    assert {name for _, name in linked} == {page.stem for page in PAGES}
    assert len(index.splitlines()) < 40
    for title, name in linked:
        text = (ROOT / "docs" / "results" / f"{name}.md").read_text(encoding="utf-8")
        assert text.startswith(f"# Results: {title}\n") and "](../results.md)" in text
        assert text.count(script.BEGIN) == text.count(script.END) == 1


def test_every_result_with_a_table_stands_on_one_page(script: Any) -> None:
    shown = [name for topic in script.TOPICS.values() for name in topic.titles]
    made = {path.relative_to(RESULTS).with_suffix("").as_posix() for path in RESULTS.rglob("*.md")}
    assert len(shown) == len(set(shown)) and set(shown) <= made
    # whose numbers stand in the study of gate signals
    assert made - set(shown) == {"gate/oracle"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_benchmarks_that_a_document_names_exist(document: Path) -> None:
    named = re.findall(r"\bbenchmarks/[\w/]+\.(?:py|md|json)\b", document.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.json")), ids=lambda p: p.relative_to(RESULTS).as_posix()
)
def test_a_result_names_the_script_of_its_folder(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    named = re.findall(r"python (benchmarks/[\w/]+\.py)", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert {Path(name).parent.name for name in named} <= set(path.relative_to(RESULTS).parent.parts)
    assert json.loads(text).get("smoke") is None, "a smoke run was kept"


def test_runs_on_uncommitted_changes_are_listed_shortest_first(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(commit: str, seconds: float, **more: Any) -> dict[str, Any]:
        return {
            "command": "python benchmarks/a/b.py",
            "seconds": seconds,
            "environment": {"commit": commit},
            **more,
        }

    (tmp_path / "a").mkdir()
    again = {"arms": ["x", "y z"], "seconds": 2, "environment": {"commit": "c2+"}}
    parts = {"runs": {"one": run("c1", 1) | {"command": "one"}, "two": run("c3+", 1) | {"command": "two"}}}
    for name, results in {"b": run("c1+", 9, again=[again]), "clean": run("c1", 1), "parts": parts}.items():
        (tmp_path / "a" / f"{name}.json").write_text(json.dumps(results), encoding="utf-8")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    assert script.dirty() == [
        (1.0, "two", "c3+"),
        (2.0, "python benchmarks/a/b.py --again x 'y z'", "c2+"),
        (9.0, "python benchmarks/a/b.py", "c1+"),
    ]
