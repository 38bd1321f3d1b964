"""What only a real process shows: signals, pipes, closed streams, imports, places that cannot be written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.cli.forked import Forker
from tests.cli.tiny import Places

import sprinter

CLI = [sys.executable, "-m", "sprinter"]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and pipes of POSIX")
Environment = dict[str, str]


def test_what_needs_no_model_does_not_import_transformers(environment: Environment) -> None:
    code = """
import sys
from sprinter.cli import main
assert main(["--help"]) == 0 and main(["--version"]) == 0
print([name for name in ("torch", "transformers") if name in sys.modules])
assert main(["methods", "--json"]) == 0
print([name for name in ("transformers", "tokenizers") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n[]\n") == 2 and done.stderr == ""


@pytest.fixture(scope="module")
def forker(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    found = Forker(environment, tmp_path_factory.mktemp("streams"))
    yield found
    found.close()


def test_the_reader_of_a_pipe_may_leave(forker: Forker, places: Places) -> None:
    with forker.run("generate", "x", *places.pair, "-n", "16000") as process:
        assert len(process.out.read(3)) == 3, process.errors()
        process.out.close()
        assert (process.status(), process.errors()) == (141, "")


def test_ctrl_c_in_mid_stream(forker: Forker, places: Places) -> None:
    with forker.run("generate", "x", *places.pair, "-n", "16000") as process:
        assert len(process.out.read(3)) == 3, process.errors()
        os.kill(process.pid, signal.SIGINT)
        text = process.out.read()
        assert process.status() == 130, process.errors()
    said = process.errors()
    assert text.endswith(b"\n")
    assert said.startswith("stopped early: ") and said.endswith("lossless\n") and said.count("\n") == 1


def test_ctrl_c_in_a_pipe_ends_the_chat(forker: Forker, places: Places, template: str) -> None:
    command = ["chat", *places.pair, "--template", template, "-n", "2000"]
    with forker.run(*command, stdin=b"Hello\nNever read\n") as process:
        assert len(process.out.read(3)) == 3, process.errors()
        os.kill(process.pid, signal.SIGINT)
        process.out.read()
        assert process.status() == 130
    said = process.errors()
    assert "stopped: the text so far is kept" in said and said.count("prefill") == 1


def test_places_that_cannot_be_written_and_no_network(environment: Environment, places: Places) -> None:
    if not os.path.isdir("/proc/self"):
        pytest.skip("needs /proc as a directory in which nobody can write")
    nowhere = environment | {"HOME": "/proc/nowhere", "TMPDIR": "/proc"}
    nowhere.pop("HF_HOME", None)
    command = [*CLI, "generate", "-", *places.gated, "--method", "speculative", "-n", "4", "--json"]
    done = subprocess.run(
        command, env=nowhere, cwd="/proc", input=b"Hello\n", capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout)["stats"]["new_tokens"] == 4


def test_closed_streams(environment: Environment) -> None:
    for line, status, said in (
        ("generate - <&-", 2, "standard input is closed"),
        ("--version >&-", 0, ""),
        ("generate '' 2>&-", 2, ""),
        ("--version >/dev/full", 1, "No space left on device"),
    ):
        if "/dev/full" in line and not os.path.exists("/dev/full"):
            continue
        shell = f'"$0" -m sprinter {line}'
        done = subprocess.run(
            ["sh", "-c", shell, sys.executable], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == status, line
        assert said in done.stderr and done.stderr.count("\n") == bool(said), line


def test_the_command_that_is_installed() -> None:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        points = distribution("sprinter-llm").entry_points
    except PackageNotFoundError:
        pytest.skip("the package is not installed here")
    assert [point.value for point in points.select(group="console_scripts")] == ["sprinter.cli:main"]
    assert distribution("sprinter-llm").version == sprinter.__version__


def test_the_demo_runs_as_a_module(environment: Environment) -> None:
    command = [sys.executable, "-W", "error", "-m", "sprinter", "demo", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "drift of at most 0.1" in " ".join(done.stdout.replace("│", " ").split())
