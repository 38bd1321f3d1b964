"""examples/plugin: a third party's drafter, installed from its folder and run as its users would."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.blocks import commands, run_here

import sprinter

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"
PROMPT = "one two three one two three one"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that sees the package, which is installed in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    pip = [sys.executable, "-m", "pip", "install", *options, str(PLUGIN)]
    subprocess.run(pip, check=True, capture_output=True)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
    }


def test_its_own_tests_pass_and_it_is_listed_and_generates(environment: dict[str, str]) -> None:
    install, *shown = map(shlex.split, commands(*run_here("examples/plugin/README.md", __file__)))
    assert install == ["pip", "install", "./examples/plugin"] and len(shown) == 2
    more = ["--max-new-tokens", "24", "--temperature", "0", "--json"]
    lines = [["methods", "--json"], *([*line[1:], *more] for line in shown)]
    code = f"""
import pytest
assert pytest.main(["-q", "-p", "no:cacheprovider", "tests"]) == 0
from sprinter.cli import main
for line in {lines}:
    assert main(line) == 0
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=PLUGIN, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout
    listed, *texts = map(json.loads, ended.stdout.splitlines()[-3:])
    (row,) = [row for row in listed["methods"] if row["name"] == "bigrams"]
    assert (row["lossless"], row["paper"]) == (True, "example of the Sprinter project")
    pair = sprinter.load_pair(compile=False)
    plain = pair.generate(PROMPT, method="autoregressive", max_new_tokens=24, temperature=0)
    for text in texts:
        assert text["token_ids"] == [token.id for token in plain.tokens], (
            "an exact method writes the greedy text"
        )
    assert texts[0]["stats"]["accepted"] > 0
