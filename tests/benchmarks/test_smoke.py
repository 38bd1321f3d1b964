"""Every script of benchmarks/ runs from end to end with tiny counts and keeps nothing."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.benchmarks.as_script import ROOT, run_script

FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))
SCRIPTS = [path for path in FILES if "__main__" in path.read_text(encoding="utf-8")]
MORE = {"gpu/run": ("--device", "cpu", "--minutes", "4")}
SLOW = {
    "gpu/run",
    "serve/latency",
    "serve/attacks",
    "serve/fair",
    "gpu/drafts",
    "gpu/waves",
    "real/drafts",
    "serve/load",
    "serve/fleet",
    "serve/crowd",
    "serve/remote",
    "serve/schema",
    "serve/vllm",
    "methods/tuner",
    "methods/never_slower",
    "real/rows",
    "real/weights",
    "real/padded",
}
NEEDS = dict.fromkeys(("llamacpp/agreement", "llamacpp/tokenizers"), "llama_cpp")
NEEDS |= {"serve/evaluate": "lm_eval", "serve/schema": "schemathesis", "serve/vllm": "vllm"}
KEYS = {  # what the JSON holds beside "benchmark" and "smoke"
    "engine/cache": {"measured", "laws"},
    "engine/commits": {"measured", "other"},
    "gpu": {"stages"},
    "gpu/drafts": {"drafters", "trainings"},
    "gpu/waves": {"measured"},
    "gpu/write": {"kept", "steps"},
    "llamacpp/agreement": {"rows"},
    "llamacpp/tokenizers": {"rows"},
    "methods/crosscheck": {"rows", "greedy"},
    "methods/drafters_builtin": {"rows", "sets"},
    "methods/json_schemas": {"rows"},
    "methods/json_speed": {"rows"},
    "methods/never_slower": {"measured", "runs"},
    "methods/tuner": {"rows", "time"},
    "real/drafts": {"rows", "drafters"},
    "real/padded": {"rows"},
    "real/rows": {"pairs", "runs"},
    "real/vocabularies": {"rows", "in_common"},
    "real/weights": {"law", "passes"},
    "real/when_it_pays": {"rows"},
    "real/when_it_pays_harm_builtin": {"suites"},
    "real/when_it_pays_map": {"papers"},
    "serve/adapters": {"rows", "layers"},
    "serve/attacks": {"attacks"},
    "serve/fair": {"attacks"},
    "serve/crowd": {"crowd"},
    "serve/evaluate": {"rows"},
    "serve/fleet": {"rows", "told"},
    "serve/latency": {"rows"},
    "serve/load": {"load"},
    "serve/remote": {"rows"},
    "serve/schema": {"answers", "cases"},
    "serve/step_tokens": {"rows"},
    "serve/vllm_builtin": {"greedy", "laws", "timed", "drift"},
}


def name_of(script: Path) -> str:
    return script.relative_to(FOLDER).with_suffix("").as_posix()


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if name in SLOW else []


def tracked() -> dict[str, str]:
    """Hash of every file that a benchmark could have written in the repository."""
    files = (
        path for folder in ("benchmarks", "docs") for path in (ROOT / folder).rglob("*") if path.is_file()
    )
    return {
        path.relative_to(ROOT).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module", autouse=True)
def repository_stays_as_it_is() -> Iterator[None]:
    before = tracked()
    yield
    assert tracked() == before


@pytest.mark.parametrize(
    "script", [pytest.param(script, marks=marks(name_of(script)), id=name_of(script)) for script in SCRIPTS]
)
def test_a_smoke_run(script: Path, tmp_path: Path) -> None:
    name = name_of(script)
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    ended = run_script(script, "--smoke", *MORE.get(name, ()), folder=tmp_path)
    assert ended.status == 0, ended.err[-3000:]
    told = json.loads(ended.out.splitlines()[-1])
    assert told["smoke"] is True
    check(name, told)
    assert not list(tmp_path.glob("sprinter-smoke-*")), "its temporary directory stayed"


def check(name: str, told: dict[str, Any]) -> None:
    """The script says who it is, and its JSON is what the tables are made of."""
    benchmark = told["benchmark"]
    assert benchmark in (name, f"{name}_builtin") or name.startswith(f"{benchmark}/")
    if "written" in told:
        assert told["written"] and set(told) == {"benchmark", "written", "smoke"}
        return
    for run in told["runs"].values() if "runs" in told and isinstance(told["runs"], dict) else (told,):
        assert run["command"].startswith("python ") and run["command"].split()[1].endswith(f"{name}.py")
        assert "--smoke" in run["command"]
        assert run["environment"]["torch"]
    wanted = KEYS[benchmark]
    assert wanted <= told.keys()
    for key in wanted:
        assert told[key], f"{key} is empty"
    for row in told.get("rows", ()):
        if isinstance(row, dict) and row.get("arm") == "autoregressive":
            assert row["mean_drift"][0] == 0 and row["target_calls_per_token"][0] == 1


def test_scripts_say_how_they_are_run() -> None:
    assert len(SCRIPTS) >= 20
    for script in SCRIPTS:
        described = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
        assert f"python benchmarks/{name_of(script)}.py" in described, f"{script} does not name its command"


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_files_beside_a_script_hide_no_package(script: Path) -> None:
    """A script's own folder is the first place that Python searches, until the script replaces it."""
    beside = {path.stem for path in script.parent.glob("*.py")}
    assert not beside & sys.stdlib_module_names, "hides a module of the standard library"
    tree = ast.parse(script.read_text(encoding="utf-8"))
    begun = False
    for node in tree.body:
        if isinstance(node, ast.If) and "sys.path[0] = " in ast.unparse(node):
            begun = True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            )
            roots = {str(name).partition(".")[0] for name in names}
            assert begun or roots <= sys.stdlib_module_names, f"imports {roots} before its search path is set"
    assert begun


def test_files_that_a_folder_names_exist() -> None:
    for init in FOLDER.glob("*/__init__.py"):
        for file in re.findall(r"``(\w+\.py)``", init.read_text(encoding="utf-8")):
            assert (init.parent / file).is_file(), f"{init.parent.name} has no {file}"
