"""docs/architecture.md holds against the imports, docs/how-a-round-goes.md against the code as it runs."""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import sprinter

pytest.importorskip("grimp", reason="comes with import-linter")
from scripts import make_architecture as architecture

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "sprinter"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
ROUND = (ROOT / "docs/how-a-round-goes.md").read_text(encoding="utf-8")
REDRAW = "run python scripts/make_architecture.py"


@pytest.fixture(scope="module")
def imports() -> dict[str, frozenset[str]]:
    return architecture.read_imports()


def listed() -> dict[str, frozenset[str]]:
    """The page's list of imports."""
    (block,) = re.findall(r"<!-- imports:begin -->\n```text\n(.*?)\n```", PAGE, re.S)
    rows = [line.split() for line in block.splitlines()]
    return {name: frozenset(others) for name, *others in rows}


# --- the diagram ------------------------------------------------------------------------------------------------------
def test_diagram_and_list_are_those_of_the_imports(imports: dict[str, frozenset[str]]) -> None:
    assert listed() == imports, REDRAW
    assert architecture.written(PAGE, imports) == PAGE, REDRAW


def test_another_import_changes_list_and_diagram(imports: dict[str, frozenset[str]]) -> None:
    more = imports | {"theory": imports["theory"] | {"training"}}
    assert architecture.list_imports(more) != architecture.list_imports(imports)
    assert architecture.diagram(imports) != architecture.diagram(more)


def test_every_room_is_described_and_every_described_room_exists(
    imports: dict[str, frozenset[str]],
) -> None:
    rows = re.findall(r"^\| \d? ?\| \[`([\w/]+)`\]\(\.\./src/sprinter/?([\w/.]*)\) \| (.+) \|$", PAGE, re.M)
    assert sorted(name for name, _, _ in rows) == sorted(imports)
    for name, path, words in rows:
        expected = name if (SRC / name).is_dir() else "__init__.py" if name == "sprinter" else f"{name}.py"
        assert path == expected and (SRC / path).exists()
        assert len(words) > 8, name


def test_folders_with_modules_are_rooms(imports: dict[str, frozenset[str]]) -> None:
    folders = {path.parent.relative_to(SRC).as_posix() for path in SRC.rglob("*.py")} - {"."}
    modules = {path.stem for path in SRC.glob("*.py")} - {"__init__", "__main__"}
    assert folders | modules | {"sprinter"} == set(imports)


def test_floors_are_those_of_import_linter_on_the_page(imports: dict[str, frozenset[str]]) -> None:
    floors, floor, on_page = architecture.floors(imports), 0, {}
    assert floors["errors"] == 0 < floors["laws"] < floors["decode"] < floors["engine"] < floors["cli"]
    for number, name in re.findall(r"^\| (\d?) ?\| \[`([\w/]+)`\]", PAGE, re.M):
        floor = int(number or floor)
        on_page[name] = floor
    assert on_page == {name: floors[architecture.top_level(name)] for name in imports}


def test_imports_go_down_or_stay_in_the_package(imports: dict[str, frozenset[str]]) -> None:
    floors, tops = architecture.floors(imports), architecture.top_level
    pairs = {(tops(one), tops(other)) for one, others in imports.items() for other in others}
    assert [(one, other) for one, other in pairs if one != other and floors[one] <= floors[other]] == []


# --- a round ----------------------------------------------------------------------------------------------------------
@cache
def definitions(path: Path) -> dict[str, ast.AST]:
    """Functions, classes and methods of a file, by qualified name."""
    found: dict[str, ast.AST] = {}

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def named(page: str) -> list[tuple[str, str]]:
    """(file in src/sprinter, name) of each link to a definition."""
    return [
        (path, name) for name, path in re.findall(r"\[`([\w.]+)`\]\(\.\./src/sprinter/([\w/]+\.py)\)", page)
    ]


def test_a_round_names_what_exists() -> None:
    links = named(ROUND)
    assert len(links) > 40 and len(ROUND.splitlines()) < 120
    assert [link for link in links if link[1] not in definitions(SRC / link[0])] == []


def test_a_round_quotes_the_code() -> None:
    parts = re.split(r"^ *```python\n(.*?)^ *```$", ROUND.split("## 1.")[1], flags=re.M | re.S)
    for before, quote in zip(parts[::2], parts[1::2], strict=False):
        files = [SRC / path for path, _ in named(before)]
        lines = "\n".join(line.strip() for line in quote.strip().splitlines())
        sources = [path.read_text(encoding="utf-8") for path in files]
        held = ["\n".join(line.strip() for line in source.splitlines()) for source in sources]
        assert any(lines in source for source in held), quote
    assert len(parts) == 5


def test_a_round_goes_as_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", ROUND, re.M | re.S)
    calls: list[tuple[str, str]] = []
    installed = Path(sprinter.__file__).parent

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(installed):
            calls.append((path.relative_to(installed).as_posix(), frame.f_code.co_qualname))

    def generate(*args: Any, **options: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return own(*args, **options)
        finally:
            sys.setprofile(before)

    own = sprinter.Pair.generate
    monkeypatch.setattr(sprinter.Pair, "generate", generate)
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    first = [token for token in namespace["out"].tokens if token.round == 1]
    (shown,) = re.findall(r"^\| token \| (.+) \|\n\| --- .+\n\| origin \| (.+) \|$", ROUND, re.M)
    assert [f"`{token.text}`" for token in first] == shown[0].split(" | ")
    assert [token.origin.value for token in first] == shown[1].split(" | ")

    steps = named(ROUND.split("## 1.")[1].split("## What differs")[0])
    functions = [step for step in steps if isinstance(definitions(SRC / step[0])[step[1]], ast.FunctionDef)]
    assert len(functions) > 30
    running = iter(calls)
    late = [step for step in functions if step not in running]  # each is looked for behind the one before
    assert late[:1] == [], "not called in the order of the page"


def test_a_round_opens_few_files() -> None:
    """Files whose functions run in the middle of a text by ``speculative``: it may only fall."""
    opened: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(installed):
            opened.add(path.relative_to(installed).as_posix())

    installed, before = Path(sprinter.__file__).parent, sys.getprofile()
    pair = sprinter.load_pair(compile=False)
    stream = pair.stream("The river rises in the", method="speculative(gamma=4)", max_new_tokens=40, seed=1)
    with stream:
        for _ in range(6):
            next(stream)
        sys.setprofile(note)
        try:
            for _ in range(6):
                next(stream)
        finally:
            sys.setprofile(before)
    assert 0 < len(opened) <= 12, sorted(opened)
