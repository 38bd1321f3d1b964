"""Units that are compiled at the same time, by processes of their own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import fresh, tiny
from torch import nn
from torch._inductor import aoti_load_package

from sprinter.errors import UserError
from sprinter.models.capture import together
from sprinter.models.capture.compiled import Recipe
from sprinter.models.capture.runner import PASS, CapturedRunner
from sprinter.models.capture.together import compile_together
from sprinter.models.capture.units import CompiledUnits
from sprinter.models.runner import make_runner


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPRINTER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(together, "_cores", lambda: 2)
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler and no helper: this process writes a file for each program."""

    def build(program: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
        assert program.module()(torch.zeros(2)).tolist() == [1, 1]
        path.write_bytes(b"code")

    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(together, "build", build)


def runner_of(model: Any, may_compile: bool = True) -> CapturedRunner:
    return CapturedRunner(model, 1, 40, {"": None}, CompiledUnits(model, {"": None}, may_compile))


def recipes(count: int = 2, model: Any = None) -> list[Recipe]:
    """Recipes of a program of one addition."""

    class Add(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    def export() -> torch.export.ExportedProgram:
        return torch.export.export(Add(), (torch.zeros(2),))

    return [Recipe(f"pass-{i}", model or tiny("gpt2"), nn.Identity(), {}, export) for i in range(count)]


def left(cache: Path) -> list[str]:
    return sorted(path.suffix for path in cache.glob("*") if path.suffix != ".lock")


def test_a_helper_compiles_and_what_is_done_is_told(
    cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "_work", lambda folder: False)  # the helper does it all
    compile_together(recipes())
    assert left(cache) == [".pt2", ".pt2"]
    for path in cache.glob("*.pt2"):
        assert aoti_load_package(str(path))(torch.zeros(2)).tolist() == [1, 1]
    assert [record.getMessage() for record in caplog.records if record.name == "sprinter"] == [
        "compiling 2 parts of the models, once, 2 at a time; a minute or two",
        "compiled 1 of 2 parts",
        "compiled 2 of 2 parts",
    ]


@pytest.mark.slow
def test_what_a_helper_compiles_is_what_runs(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = fresh("llama"), torch.tensor([[3, 9, 11]])
    runner = runner_of(model)
    missing = runner.missing(PASS, [])
    assert [one.name for one in missing] == ["pass-any", "pass-one"]
    assert runner.missing(PASS, []) == []  # told once
    with monkeypatch.context() as patch:
        patch.setattr(together, "_work", lambda folder: False)  # the helper does it all
        compile_together(missing)
    assert left(cache) == [".pt2", ".pt2"]
    other, row = runner_of(model, may_compile=False), make_runner(model, batch=1, max_len=40)
    for given in (tokens, tokens[:, :1]):
        (logits, _), expected = other.run(PASS, given, None) or (None, None), row.extend(given).logits
        assert logits is not None and expected is not None
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("quick")
def test_code_on_disk_is_not_compiled_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = recipes()
    compile_together(pair)
    assert left(cache) == [".pt2", ".pt2"]
    monkeypatch.setattr(together, "_compile_all", None)
    compile_together(pair)
    compile_together([*pair, *recipes(3)[2:]])  # a single one is left to its first use
    assert left(cache) == [".pt2", ".pt2"]


def test_a_single_one_and_large_models_are_left_to_their_first_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_together(recipes(1))
    monkeypatch.setattr(together, "_LARGE", 10)
    compile_together(recipes())
    monkeypatch.undo()
    monkeypatch.setenv("SPRINTER_CACHE", str(cache))
    monkeypatch.setattr(together, "_cores", lambda: 1)
    compile_together(recipes())
    assert not cache.exists()


@pytest.mark.usefixtures("quick")
def test_a_helper_that_cannot_start_is_not_needed(cache: Path) -> None:
    compile_together(recipes())
    assert left(cache) == [".pt2", ".pt2"]


def test_the_work_of_a_helper_that_dies_is_left_to_its_first_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(together, "_work", lambda folder: False)
    compile_together(recipes())
    assert left(cache) == []


@pytest.mark.usefixtures("quick")
def test_what_cannot_be_compiled_or_written_is_left_to_its_first_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(program: Any, path: Path) -> None:
        if path.stem == "0":
            raise RuntimeError("no written form")
        path.write_bytes(b"no program" if path.stem == "1" else made)

    (keep := cache.parent / "kept.pt2").touch()
    torch.export.save(recipes(1)[0].export(), keep)
    made = keep.read_bytes()
    monkeypatch.setattr(torch.export, "save", save)
    compile_together(recipes(3))
    assert left(cache) == [".pt2"]


def test_of_one_architecture_only_the_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_compile_all", None)
    first = recipes(1)
    compile_together([*first, *(replace(one, model=fresh("gpt2")) for one in first)])
    assert left(cache) == []


def test_the_helpers_end_with_an_interruption(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        began.append(real(["sleep", "60"], **more))
        return began[-1]

    def interrupt(folder: Path) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(together.subprocess, "Popen", popen)
    monkeypatch.setattr(together, "_work", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_together(recipes())
    assert len(began) == 1 and began[0].poll() is not None
    assert left(cache) == []


@pytest.mark.usefixtures("quick")
def test_a_model_that_changes_meanwhile(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = fresh("gpt2"), together._work

    def work(folder: Path) -> bool:
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        return real(folder)

    monkeypatch.setattr(together, "_work", work)
    with pytest.raises(UserError, match="changed while it was compiled"):
        compile_together(recipes(model=model))
    assert left(cache) == []


def test_a_helper_leaves_when_nothing_is_left_or_nobody_waits(tmp_path: Path) -> None:
    together.help_compile(str(tmp_path), parent=-1, threads=torch.get_num_threads())
    (tmp_path / "whole").touch()
    together.help_compile(str(tmp_path), parent=os.getppid(), threads=torch.get_num_threads())
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
