"""What CI runs goes on behind a group that fails, in both lanes, and fails itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "run"
MAKE = """#!/bin/sh
echo "$1 runs"
test "$1" != "$FAILS" || { echo "== 1 failed, 2 passed in 3.00s =="; exit 2; }
echo "== 5 passed in 1.00s =="
"""


@pytest.mark.parametrize("fails", ["", "test", "test-gguf", "test-lowest", "test-doors", "test-newest"])
def test_each_failure_fails_the_run(fails: str, tmp_path: Path) -> None:
    for name, text in ((".ci/run", SCRIPT.read_text()), ("bin/make", MAKE), ("bin/chromium", MAKE)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "FAILS": fails}
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run(
        [bash, str(tmp_path / ".ci/run")], env=env, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == bool(fails), ended.stderr
    goals = re.findall(r"^(test[\w-]*) runs$", ended.stdout, re.M)
    assert sorted(set(goals)) == sorted(goals) and len(goals) == 10, "each once"
    *verdicts, last = ended.stdout.splitlines()[-11:]
    told = dict(re.findall(r"^ci: make (test[\w-]*).*?: (passed|FAILED), \d+ min", "\n".join(verdicts), re.M))
    assert told == {goal: "FAILED" if goal == fails else "passed" for goal in goals}
    assert re.fullmatch(r"ci: \d+ min in all", last)
