"""Every block of Python and shell of the pages runs, here or in the test that a comment above it names.

A block is run as its page has it, the blocks of a page one after the other, in a folder with sample files. Models that
a page names are tiny ones, and counts are cut, so that a page takes seconds. ``tests/blocks.py`` lists what is not run;
of such ``sprinter`` commands the options are checked.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from benchmarks.smoke import made_up_data
from tests.blocks import LINES, NOT_RUN, PAGES, ROOT, Block, blocks, commands
from tests.cli.chats import TEMPLATE
from tests.cli.tiny import HIDDEN, save_tiny, tiny_tokenizer
from tests.models.test_lora import write as write_adapter
from typer.main import get_command

import sprinter
from sprinter.bench.arms import parse
from sprinter.cli import main
from sprinter.cli.app import app
from sprinter.decode.registry import ACCEPT, DRAFTER, METHODS, STOP, TRUST
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear
from sprinter.models import source
from sprinter.tuning import run as tuning
from sprinter.tuning.candidates import candidates

TALK = [
    {"role": "user", "content": "What is 12 * 7?"},
    {"role": "assistant", "content": "It is 84, of course."},
]
RECORD = {"prompt": "What is 12 * 7?", "answer": "It is 84, of course.", "turns": ["What is 12 * 7?"]}
FILES = {
    "texts.txt": "The river rises in the hills and flows past the town.\n" * 4,
    "prompts.txt": "The river rises in\nThe old mill stands\n" * 4,
    "talk.json": json.dumps(TALK[:1]),
    "talks.jsonl": (json.dumps({"messages": TALK[:1]}) + "\n") * 4,
    "texts.jsonl": (json.dumps({"messages": TALK}) + "\n") * 40,
    "answers.jsonl": (json.dumps(RECORD) + "\n") * 20,
    **dict.fromkeys(("prompts.jsonl", "questions.jsonl"), (json.dumps(RECORD) + "\n") * 40),
}
"""Files that pages name as the reader's own."""
SHORT = {
    "chat": "-n 8", "generate": "-n 8", "gate label": "-n 4 --limit 40", "gate mine": "--max-new-tokens 8 --limit 8",
    "gate train --labels": "--epochs 1 --drift 0.5", "draft distill": "-n 8 --steps 2", "draft sizes": "-n 8 --steps 2",
    "draft train": "-n 8 --steps 2", "draft vocabulary": "--size 64", "doctor": "--probe-tokens 24",
    "bench -": "-n 4 --warmup 0 --data DIR --no-analysis --no-quality",
    "tune": "-n 6 --prompts 2 --time none --no-figures",
}  # fmt: skip
"""Command → options with small counts; of an option that is given twice the last one counts."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of a tiny target, a draft, a gate and an adapter."""
    found = {name: tmp_path_factory.mktemp("tiny") / name for name in ("target", "draft", "gate", "adapter")}
    write_adapter(found["adapter"], save_tiny(found["target"], seed=1))
    draft = save_tiny(found["draft"], seed=2, layers=1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for name in ("target", "draft"):
        tokenizer.save_pretrained(found[name])
    config = HeadConfig(HIDDEN, "draft", "target", None, weights_fingerprint(draft))
    save_head(
        Head(config, Linear.of(torch.randn(1, HIDDEN), torch.zeros(1))), found["gate"], "# A random gate\n"
    )
    return found


@pytest.fixture(scope="module")
def builtin() -> sprinter.Pair:
    return sprinter.load_pair()


class Page:
    """Runs the blocks of a page."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stack: ExitStack, names: dict[str, Any]) -> None:
        self.names, self.variables, self.ports = (
            {"__name__": "page", **names},
            dict[str, str](),
            dict[str, int](),
        )
        self._patch, self._stack = monkeypatch, stack
        self.ran = self.checked = 0
        monkeypatch.setattr("sprinter.serve.run.serve", self._serve)

    def _serve(self, settings: Any, *given: Any) -> None:
        """In place of the server's loop: it serves until the end of the page, at a free port."""
        from dataclasses import replace

        from tests.serve.server import running

        from sprinter.serve.registry import Models

        models = Models(replace(settings, port=0, drain_timeout_s=1), *given)
        self.ports[str(settings.port)] = self._stack.enter_context(running(models)).port

    def ask_servers(self) -> None:
        """Every model of the page's servers answers, but for GGUF files, which are not there."""
        for port in self.ports.values():
            url = f"http://127.0.0.1:{port}/v1"
            names = [one["id"] for one in httpx2.get(f"{url}/models", trust_env=False).json()["data"]]
            for name in names:
                body = {"model": name, "prompt": "The river", "max_tokens": 2, "sprinter": {"method": "svip"}}
                answer = httpx2.post(f"{url}/completions", json=body, timeout=60, trust_env=False)
                assert answer.status_code == 200 or name == "code", answer.text

    def _here(self, code: str) -> str:
        """Code that asks the servers of this page."""
        for port, own in self.ports.items():
            code = re.sub(rf"(localhost|127\.0\.0\.1):{port}\b", rf"127.0.0.1:{own}", code)
        return code

    def python(self, name: str, block: Block) -> None:
        code = re.sub(r"\blimit=\d+", "limit=2, new_tokens=4", self._here(block.code))
        exec(compile("\n" * block.line + code, name, "exec", dont_inherit=True), self.names)

    def shell(self, line: str, *, run: bool) -> None:
        """One command, with variables, comments, a pipe into it and a file for its output."""
        line = re.sub(r"\$(\w+)", lambda name: self.variables.get(name[1], name[0]), line)
        words = shlex.split(line, comments=True)
        if given := re.fullmatch(r"(\w+)=(\S+)", line):
            self.variables[given[1]] = given[2]
            return
        if any(re.match(one, shlex.join(words)) for one in LINES):
            run = False
        if run and words[0] == "cd":
            Path(words[1]).mkdir(parents=True, exist_ok=True)
            os.chdir(words[1])
            return
        typed, out = b"", None
        if ">" in words:
            words, out = words[: (at := words.index(">"))], words[at + 1]
        if run and "|" in words:
            words, before = words[(at := words.index("|")) + 1 :], words[:at]
            typed = subprocess.run(before, check=True, capture_output=True).stdout
        if words[0] != "sprinter":
            if run:
                subprocess.run(
                    ["bash", "-c", self._here(line).replace("curl ", "curl --fail ")], check=True, timeout=60
                )
            self.ran += run
            return
        if not run:
            self.checked += not words[1].startswith("-") and check_options(words[1:])
            return
        self.ran += 1
        command = next((one for one in SHORT if shlex.join(words[1:]).startswith(one)), "")
        if command == "bench -":
            words = [re.sub(r":\d+$", ":1", word) for word in words]
        if words[1:3] == ["bench", "compare"]:
            for folder in words[3:]:
                shutil.copytree("run", folder)
        self._patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed)))
        short = shlex.split(SHORT.get(command, ""))
        if command == "doctor" and "--probe" not in words:
            short = []
        assert main([*words[1:], *short]) == 0, line
        if out is not None:
            Path(out).write_text("written\n")


def check_options(words: Sequence[str]) -> bool:
    """Whether a command line has its command and options: it raises where it has not."""
    command, words = get_command(app), list(words)
    context = command.make_context("sprinter", words)
    while hasattr(command, "resolve_command") and (left := [*context._protected_args, *context.args]):
        _, command, words = command.resolve_command(context, left)
        assert command is not None
        context = command.make_context(command.name, words, parent=context)
    return True


@pytest.mark.parametrize("name", PAGES)
def test_blocks_run(
    name: str, tiny: dict[str, Path], builtin: sprinter.Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    (tmp_path / "DIR").symlink_to(made_up_data())
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "sql").symlink_to(tiny["adapter"])
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    shutil.copytree(ROOT / "examples" / "serve", tmp_path / "examples" / "serve")
    shutil.copy(ROOT / "examples" / "texts.txt", tmp_path / "examples")
    for arms in ("methods", "peers"):  # two of each
        monkeypatch.setitem(parse._SETS, arms, lambda every=parse._SETS[arms]: every()[:2])
    for known in (TRUST, STOP, ACCEPT, DRAFTER, METHODS):  # what a page registers goes with it
        monkeypatch.setattr(known, "_items", dict(known._items))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(source, "_fetched", lambda name, which, *_: tiny[which])
    monkeypatch.setattr(
        source, "_find_gguf", lambda path, name, which, _: source.Provenance(tiny[which], name)
    )
    monkeypatch.setattr(tuning, "candidates", lambda *given: candidates(*given)[:8])  # of some hundred
    monkeypatch.setattr("sprinter.heads.files._from_hub", lambda *_: tiny["gate"])
    names = {"sprinter": sprinter, "pair": builtin, "TARGET": "org/target", "DRAFT": "org/draft"}
    with ExitStack() as stack:
        page = Page(monkeypatch, stack, names)
        for block in PAGES[name]:
            if block.kind == "shell":
                for line in commands(block.code):
                    page.shell(line, run=not block.reason)
            elif not block.reason:
                page.python(name, block)
        page.ask_servers()
        page.names.clear()
        gc.collect()  # a pair with a file of texts writes it when it is released: into this folder


def test_tests_that_reasons_name_are_there() -> None:
    reasons = [(name, block.reason) for name, found in PAGES.items() for block in found if block.reason]
    for name, reason in reasons:
        if reason.startswith("run by "):
            assert name in (ROOT / reason.removeprefix("run by ")).read_text(encoding="utf-8"), name
    named = re.findall(r"tests/[\w./]+\b", " ".join(LINES.values()))
    assert len(named) > 2 and [one for one in named if not (ROOT / one).exists()] == []


def test_what_is_not_run_is_listed_with_its_reason() -> None:
    found = {
        (block.reason.removeprefix("not run: "), name)
        for name, those in PAGES.items()
        for block in those
        if block.reason.startswith("not run: ")
    }
    assert found == {(reason, page) for reason, pages in NOT_RUN.items() for page in pages.split(", ")}


def test_a_new_block_is_run_unless_a_reason_stands_above_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\n1 / 0\n```\n\n<!-- not run: needs a moon -->\n\n1. ...\n\n   ```sh\n   sprinter x\n   ```\n"
    )
    first, second = blocks(page)
    assert (first.reason, second.reason) == ("", "not run: needs a moon")
    with pytest.raises(ZeroDivisionError):
        exec(first.code)
    with pytest.raises(Exception, match="x"):
        check_options(shlex.split(second.code)[1:])
