"""What a start of the command line imports, and what the shell completes; in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "huggingface_hub", "numpy", "safetensors")


def sprinter(environment: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sprinter", *args]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("args", "allowed"), [
    (("--version",), ()), (("--help",), ()), (("generate", "--help"), ()), (("gate", "train", "--help"), ()),
    (("draft", "train", "--help"), ()), (("tune", "--help"), ()), (("serve", "--help"), ()),
    (("theory", "predict", "--help"), ()), (("bench", "--help"), ()), (("generate",), ()), (("chat",), ()),
    (("methods", "--json"), ("torch", "numpy")),  # rules are made of torch
], ids=lambda value: " ".join(value) or "nothing")  # fmt: skip
def test_a_start_imports_no_more_than_it_needs(
    environment: dict[str, str], args: tuple[str, ...], allowed: tuple[str, ...]
) -> None:
    code = f"import sys; from sprinter.cli import main; main({args!r}); print(*sys.modules, file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(ended.stderr.split())
    assert "sprinter.cli.app" in loaded
    assert [name for name in HEAVY if name in loaded and name not in allowed] == []
    assert args not in (("--help",), ("--version",)) or "pydantic" not in loaded, (
        "it takes longer than the rest"
    )
    assert args != ("--help",) or "importlib.metadata" not in loaded


def test_the_shell_completes_commands_options_and_methods(environment: dict[str, str]) -> None:
    def complete(words: str) -> list[str]:
        asked = {
            "_SPRINTER_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        ended = sprinter({**environment, **asked})
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split()

    assert complete("sprinter gen") == ["generate"]
    assert set(complete("sprinter generate x --draft")) == {
        "--draft",
        "--draft-dtype",
        "--draft-revision",
        "--draft-runner",
        "--draft-vocabulary",
    }
    assert complete("sprinter generate x -m spec") == ["speculative", "specdec++", "specinfer", "spectr"]


def test_the_completion_script_is_shown(environment: dict[str, str]) -> None:
    ended = sprinter(
        environment | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}, "--show-completion", "bash"
    )
    assert ended.returncode == 0 and "_SPRINTER_COMPLETE=complete_bash" in ended.stdout
