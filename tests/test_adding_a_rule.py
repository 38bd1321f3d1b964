"""docs/adding-a-rule.md, followed word by word in a copy of the tree: without a step the tests ask for it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from tests.blocks import run_here
from tests.test_method_pages import HEADINGS
from torch import Tensor

from sprinter.decode import (
    ACCEPT,
    STOP,
    TRUST,
    Fixed,
    Method,
    Origin,
    Registry,
    Untrusted,
    check_accept,
    parse_method,
    signal,
)  # fmt: skip
from sprinter.decode.enumerate import MarkovPair, run_chain
from sprinter.decode.loop import Limits
from sprinter.decode.signals import SIGNALS
from sprinter.random import AddressedDraws

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/test_method_pages.py",
    "tests/test_house.py::test_the_home_of_rules_names_every_rule_and_what_a_plug_in_needs",
    "tests/decode/test_conformance.py::test_registered_accept_rules_on_ten_thousand_pairs[least]",
)


def steps() -> dict[str, str]:
    """Path -> the block that the page shows below it, whole or as an addition."""
    page = (ROOT / "docs/adding-a-rule.md").read_text(encoding="utf-8")
    found = re.findall(r"^`([^`]+)`(, .. the (?:end|table))?\n\n(`{3,4})\w+\n(.*?)^\3$", page, re.M | re.S)
    return {path: block for path, _, _, block in found}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the steps touch and of what its tests read."""
    for part in ("src", "docs/methods", "scripts", "tests"):
        ignored = shutil.ignore_patterns("builtin", "__pycache__", "*.pyc")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


def check(tree: Path, *only: str) -> subprocess.CompletedProcess[str]:
    return run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(only or TESTS))


def write(tree: Path, path: str, text: str) -> None:
    (tree / path).write_text(text, encoding="utf-8")


def replace(tree: Path, path: str, old: str, new: str) -> None:
    text = (tree / path).read_text(encoding="utf-8")
    assert old in text, f"{path} has no {old!r}"
    write(tree, path, text.replace(old, new, 1))


def append(tree: Path, path: str, block: str) -> None:
    write(tree, path, (tree / path).read_text(encoding="utf-8") + "\n\n" + block)


def test_the_rule_and_the_page_of_the_example_are_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACCEPT, "_items", dict(ACCEPT._items))
    rule, page, *_ = steps().values()
    module = types.ModuleType("least")
    monkeypatch.setitem(sys.modules, "least", module)
    exec(compile(rule, "docs/adding-a-rule.md", "exec"), vars(module))
    for least in (module.Least(), module.Least(0.0), module.Least(1.0)):
        check_accept(least, count=200)
    assert parse_method("accept=least(chance=0.1)").accept == module.Least(0.1)
    parts = re.split(r"^## (.+)$", page, flags=re.M)
    assert parts[1::2] == HEADINGS and "| `chance` | `0.2` |" in page


def test_the_signal_of_the_page_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    block = run_here("docs/adding-a-rule.md", __file__)[-1]
    ours = {name: SIGNALS[name] for name in ("margin", "margin_processed")}
    for name in ours:
        monkeypatch.delitem(SIGNALS, name)
    exec(block, {"signal": signal, "Tensor": Tensor})
    for name, one in ours.items():
        made = SIGNALS[name]
        assert made is not one
        assert (made.base, made.inputs, made.span, made.capture) == (
            one.base,
            one.inputs,
            one.span,
            one.capture,
        )


def test_the_files_that_the_checklists_name_exist() -> None:
    for document in ("CONTRIBUTING.md", "docs/adding-a-rule.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        named = re.findall(r"`((?:decode|scripts|docs|tests)/[\w./-]+)`", text)
        assert len(named) >= 5
        assert [name for name in named if "least" not in name and "KIND" not in name
                and not any((ROOT / root / name).exists() for root in (".", "src/sprinter"))] == []  # fmt: skip
    shown = text[text.index("pytest ") :]
    assert {"tests/decode/test_conformance.py", "tests/test_method_pages.py"} <= set(shown.split())


@pytest.mark.slow
def test_the_page_is_true(tree: Path) -> None:
    shown = steps()
    places = ["src/sprinter/decode/accept/least.py", "docs/methods/accept/least.md",
              "scripts/figures.py", "src/sprinter/decode/presets.py"]  # fmt: skip
    assert list(shown) == places
    rule, page, figure, preset = places

    write(tree, rule, shown[rule])  # 1 and 2
    init, lenient = "src/sprinter/decode/accept/__init__.py", "from sprinter.decode.accept.mentored"
    replace(
        tree,
        init,
        lenient,
        f"from sprinter.decode.accept.least import Least\n{lenient}",
    )
    replace(tree, init, '"Lenient",', '"Least", "Lenient",')
    unnamed = check(tree, TESTS[1])
    assert unnamed.returncode == 1 and "Least" in unnamed.stdout
    home = "src/sprinter/decode/__init__.py"
    named = "    from sprinter.decode.accept import {0} as {0}\n"
    replace(tree, home, named.format("Lenient"), named.format("Least") + named.format("Lenient"))
    assert check(tree, TESTS[1], TESTS[2]).returncode == 0
    append(tree, preset, shown[preset])  # 5, before what it asks for
    missing = check(tree, TESTS[0])
    assert missing.returncode == 1
    asked = ("write docs/methods/accept/least.md: step 3 of", "accept-least", "test_every_preset", "2 failed")
    assert [word for word in asked if word not in missing.stdout] == []

    write(tree, page, shown[page])  # 3
    index = "docs/methods/README.md"
    replace(
        tree,
        index,
        "[lenient](accept/lenient.md) ·",
        "[least](accept/least.md) · [lenient](accept/lenient.md) ·",
    )
    (row,) = re.findall(
        r"^(\| `least.*)$", (ROOT / "docs/adding-a-rule.md").read_text(encoding="utf-8"), re.M
    )
    before = "| `lenient(w=0.8, gamma=5)` | nobody"
    replace(tree, index, before, f"{row}\n{before}")
    table = "FIGURES: dict[str, pic.Drawing] = {\n"
    replace(tree, figure, table, table + textwrap.indent(shown[figure], "    "))  # 4
    drawn = run(tree, "scripts/figures.py", "--only", "least")
    assert drawn.returncode == 0, drawn.stderr
    done = check(tree)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("registry", "name", "spec"),
    [(STOP, "Total", "stop=total"), (TRUST, "Streak", "trust=streak"), (ACCEPT, "Walk", "accept=walk")],
)
def test_the_other_rules_of_the_page_are_sound(
    registry: Registry, name: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that end with their own check."""
    rule = run_block(registry, name, monkeypatch)()
    part = spec.partition("=")[0]
    assert getattr(parse_method(spec), part) == rule


def run_block(registry: Registry, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the block of the page that defines a class, and give the class."""
    monkeypatch.setattr(registry, "_items", dict(registry._items))
    page = (ROOT / "docs/adding-a-rule.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (block,) = [block for block in blocks if f"class {name}(" in block]
    module = types.ModuleType(name.lower())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block, "docs/adding-a-rule.md", "exec"), vars(module))
    return getattr(module, name)


def test_the_trust_rule_of_the_page_pauses_after_a_small_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop: no token of the first round is trusted, and later rounds follow the last overlap before them."""
    rule = run_block(TRUST, "Streak", monkeypatch)(least=0.0)
    for distance, trusts in ((0.0, True), (1.0, False)):  # β is 1, or below 1 everywhere
        pair = MarkovPair(seed=3, distance=distance)
        method = Method(trust=dataclasses.replace(rule, overlap=0.99), stop=Untrusted(), cap=4)
        record = run_chain(method, pair, (0,), Limits(20), AddressedDraws(1))
        rounds = {token.round for token in record.tokens if token.origin is Origin.TRUSTED}
        assert rounds == (set(range(2, record.stats.rounds + 1)) if trusts else set())
    # The defaults that the page names.
    assert (parse_method("trust=streak").stop, parse_method("trust=streak").cap) == (Untrusted(), 20)
    assert (Method(trust=rule).stop, Method(trust=rule).cap) == (Fixed(), None)
