"""examples/gallery: each script runs and draws its picture; docs/gallery.md has them all."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sprinter.decode import ACCEPT

ROOT = Path(__file__).resolve().parents[2]
GALLERY = ROOT / "examples" / "gallery"
PICTURES = ROOT / "docs" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "draw")
DOORS = {"lm_eval_harness": "tests/doors/test_lm_eval.py", "inside_vllm": "tests/doors/test_vllm.py"}
"""Scripts of another environment, and the tests that run them there."""
SMALLER = {r"(=\w+), max_new_tokens=\d+": r"\1, max_new_tokens=12", r'"--repeats", "50"': '"--repeats", "20"'}
"""What takes a chart's script its minute, and a size at which it draws the same lines from fewer tokens."""
CHARTS = ("budget", "own_gate", "own_rule", "pareto")


def check_picture(file: Path) -> None:
    """It is an image with something on it."""
    assert 1000 < file.stat().st_size < 60_000
    assert len(list(ElementTree.parse(file).getroot())) > 10


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in DOORS])
def test_scripts_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ACCEPT, "_items", dict(ACCEPT._items))  # one of them registers a rule
    monkeypatch.syspath_prepend(str(GALLERY))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)])
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    script = GALLERY / f"{name}.py"
    code = script.read_text(encoding="utf-8")
    if name in CHARTS:
        for size, smaller in SMALLER.items():
            code = re.sub(size, smaller, code)
        assert "max_new_tokens=12" in code
    exec(compile(code, str(script), "exec"), vars(module))
    check_picture(tmp_path / f"{name}.svg")


def test_the_page_shows_each_script_with_its_picture() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\(gallery/(\w+)\.svg\)", page)) == SCRIPTS
    assert sorted(re.findall(r"\]\(\.\./examples/gallery/(\w+)\.py\)", page)) == SCRIPTS
    assert sorted(path.stem for path in PICTURES.iterdir()) == SCRIPTS
    for picture in PICTURES.iterdir():
        check_picture(picture)
    for name, test in DOORS.items():
        assert f"{name}.py" in (ROOT / test).read_text(encoding="utf-8")
