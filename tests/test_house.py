"""The house: sizes, public names, package data, documents."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
from tests.conftest import UNMEASURED

import sprinter
import sprinter.decode
from sprinter.decode import parse_method

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "sprinter"
SOURCES = sorted(SRC.rglob("*.py"))
MODULES = sorted(
    m.name
    for m in pkgutil.walk_packages(sprinter.__path__, "sprinter.")
    if not m.name.endswith(("__main__", "vllm.worker", "vllm.v2"))  # these ones' classes derive from vLLM's
)
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/*.md")])
MAX_TREE_BYTES = 40 * 2**20


def text_of(name: str) -> str:
    """A file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def tracked_files() -> list[Path]:
    """What git would carry: tracked files, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(SRC).as_posix())
def test_source_files_are_short(path: Path) -> None:
    limit = 150 if path == SRC / "decode" / "loop.py" else 500
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


def test_tests_benchmarks_and_tools_are_short() -> None:
    others = [path for path in tracked_files() if path.suffix == ".py" and SRC not in path.parents]
    assert len(others) > 100
    lines = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for path in others
    }
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_no_class_or_type_name_means_two_things() -> None:
    where: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.name] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            for name in (name.lstrip("_") for name in names):
                if name[:1].isupper() and not name.isupper():
                    where.setdefault(name, []).append(path.relative_to(SRC).as_posix())
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_no_module_imports_itself_through_others() -> None:
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    graph = grimp.build_graph("sprinter", cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert (
        len(list(TopologicalSorter(imports).static_order())) == len(imports) > 100
    )  # CycleError names a circle


def test_the_loop_is_where_the_limit_looks() -> None:
    assert SRC / "decode" / "loop.py" in SOURCES


@pytest.mark.parametrize("package", [sprinter, sprinter.decode], ids=lambda package: package.__name__)
def test_public_names_exist_and_are_described(package: ModuleType) -> None:
    names, where = list(package.__all__), package.__name__
    order = sorted(set(names), key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert names == order, "__all__ is sorted, constants, classes, functions, and names nothing twice"
    assert set(names) <= set(dir(package))
    for name in names:
        assert hasattr(package, name), f"{where}.{name} is in __all__ and does not exist"
        own = getattr(package, name).__doc__ or ""
        assert len(own.strip()) > 10, f"{where}.{name} has no docstring"
        # a dataclass without a docstring is given its signature for one
        assert not own.startswith(f"{name}("), f"{where}.{name} has no docstring of its own"


def test_the_home_of_rules_names_every_rule_and_what_a_plug_in_needs() -> None:
    from sprinter.decode import accept, stop, trust

    rules = {*trust.__all__, *stop.__all__, *accept.__all__}
    drafters = {"Allocated", "Drafter", "Lookup", "Model", "Nothing", "Drawn", "Dynamic", "Static", "Widened"}
    drafters |= {"DraftHeads", "HeadText", "Heads", "Parallel", "Sparse", "Suffix", "Recycle"}
    growers = {"TreeBuilder", "Ranked", "Root", "Siblings", "Tips"}
    proposers = {"SIGNALS", "signal", "Context", "Draws", "Proposal", "Proposer", "Purpose"}
    registries = {"ACCEPT", "DRAFTER", "METHODS", "STOP", "TRUST", "Registry"}
    checks = {
        "choice",
        "count",
        "flag",
        "number",
        "at_least",
        "between",
        "check_accept",
        "check_drafter",
        "check_stop",
        "check_trust",
    }
    specs = {"Method", "method_table", "parse_method", "preset"}
    left = {"Chain", "Control", "LawPair", "Origin", "RuleState", "Stats", "Token", "Tree", "Verdict"}
    assert (
        set(sprinter.decode.__all__)
        == rules | drafters | growers | proposers | registries | checks | specs | left
    )


def test_the_home_of_rules_is_imported_without_them() -> None:
    code = "import sys, sprinter.decode; print([name for name in sys.modules if name in ('torch', 'transformers')])"
    code += "; from sprinter.decode import TRUST; print('coin' in TRUST.names())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["[]", "True"]


def test_the_command_line_is_the_package_run_as_a_module() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "sprinter", "--version"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, f"sprinter {sprinter.__version__}\n")


DOORS = {"sprinter.doors.lm_eval": "lm_eval"}
"""Modules that subclass what a tool has, and the tool, which is in an environment of its own."""


def imported(name: str) -> ModuleType:
    if name in DOORS:
        pytest.importorskip(DOORS[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("name", MODULES)
def test_modules_import_and_their_public_names_exist(name: str) -> None:
    module = imported(name)
    assert (module.__doc__ or "").strip(), f"{name} has no docstring"
    missing = [public for public in getattr(module, "__all__", []) if not hasattr(module, public)]
    assert missing == []


@pytest.mark.parametrize("name", ["sprinter", *MODULES])
def test_docstring_examples_run(name: str) -> None:
    failed, _ = doctest.testmod(imported(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_package_is_typed() -> None:
    assert (SRC / "py.typed").is_file()


def test_tree_stays_small() -> None:
    total = sum(path.stat().st_size for path in tracked_files())
    assert 0 < total <= MAX_TREE_BYTES


def test_only_safetensors_hold_weights() -> None:
    pickles = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".npy", ".npz"}
    assert [path for path in tracked_files() if path.suffix in pickles] == []


def test_methods_that_readme_names_are_there_and_keep_the_law_as_it_says() -> None:
    rows = re.findall(r"^\| `([^`]+)`.*\| (the target's|drifts) \|$", text_of("README.md"), re.MULTILINE)
    assert len(rows) == 4
    assert {spec: parse_method(spec).lossless() for spec, _ in rows} == {
        spec: law == "the target's" for spec, law in rows
    }


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    shown = re.sub(
        r"^ *(`{3,}).*?^ *\1$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S
    )  # no code
    links = re.findall(r"\]\(([^)\s]+)\)", shown)
    local = [
        link.partition("#")[0]
        for link in links
        if "://" not in link and not link.startswith(("#", "mailto:"))
    ]
    assert [link for link in local if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_of_documents_are_short(document: Path) -> None:
    prose = re.sub(  # no code, no formulas
        r"^ *(`{3,}|\$\$).*?\1$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    assert [
        line for line in prose.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")
    ] == []


def test_every_decision_is_in_the_index_and_short() -> None:
    index = text_of("docs/decisions/README.md")
    records = sorted(ROOT.glob("docs/decisions/[0-9]*.md"))
    assert records
    for record in records:
        assert f"]({record.name})" in index, f"{record.name} is not in the index"
        assert len(record.read_text(encoding="utf-8").splitlines()) <= 40, f"{record.name} is over 40 lines"


def test_version_is_the_same_everywhere() -> None:
    assert tomllib.loads(text_of("pyproject.toml"))["project"]["dynamic"] == ["version"]
    assert re.search(rf"^version: {re.escape(sprinter.__version__)}$", text_of("CITATION.cff"), re.MULTILINE)
    changelog = text_of("CHANGELOG.md")
    assert f"## [{sprinter.__version__}]" in changelog or "## [Unreleased]" in changelog


def test_every_dependency_is_pinned_and_given_a_reason() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    pins = re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", text_of("constraints.txt"), re.MULTILINE)
    pinned = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    wanted = [re.split(r"[^A-Za-z0-9_.-]", requirement)[0] for requirement in project["dependencies"]]
    developing = [re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in project["optional-dependencies"]["dev"]]
    assert {*wanted, *developing} - pinned == set()
    reasons = text_of("docs/decisions/0001-dependencies.md")
    assert [name for name in wanted if f"| {name} |" not in reasons] == []


def test_modules_without_coverage_exist() -> None:
    assert [name for name in sorted(UNMEASURED) if not (ROOT / "tests" / f"{name}.py").is_file()] == []


def test_the_script_for_ci_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "not executable"
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")


def test_numbers_in_the_documents_are_those_of_the_result_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setattr(sys, "argv", ["update_results.py", "--check"])
    status = importlib.import_module("update_results").main()
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("package", [sprinter, sprinter.decode], ids=lambda package: package.__name__)
def test_no_public_name_is_that_of_a_module_beside_it(package: ModuleType) -> None:
    """Once such a module is imported, it would stand in the place of the name."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules.isdisjoint(package.__all__)


def test_make_says_what_it_installs_and_how_long_that_took(tmp_path: Path) -> None:
    asked = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}", "demo"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    installs = [line for line in done.splitlines() if " install " in line]
    assert len(installs) == 4 and all(re.search(r'echo ".* \.\.\.".*date', line) for line in installs)
