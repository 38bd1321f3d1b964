"""scripts/train_builtin.py: a training that follows tokens is repeated exactly, and a draft is distilled from it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.smoke import made_up_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, which compiles nothing."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("train_builtin")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    return module


def test_a_pair_is_trained_and_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(stage: str, out: Path, *more: str) -> int:
        words = [
            stage,
            "--data",
            str(made_up_data()),
            "--out",
            str(out),
            "--preset",
            "tiny",
            "--device",
            "cpu",
            *more,
        ]
        monkeypatch.setattr(sys, "argv", ["train_builtin.py", *words])
        status: int = script.main()
        return status

    assert run("draft", tmp_path / "one", "--tokens", "1") == 2
    assert "train it first" in capsys.readouterr().err
    for out in ("one", "two"):
        assert run("target", tmp_path / out, "--tokens", "6144") == 0
    weights = [(tmp_path / out / "target" / "model.safetensors").read_bytes() for out in ("one", "two")]
    assert weights[0] == weights[1]
    assert run("draft", tmp_path / "one", "--tokens", "4096") == 0
    assert run("evaluate", tmp_path / "one") == 0
    found = json.loads((tmp_path / "one" / "evaluation.json").read_text())
    assert 0 < found["all"]["overlap"]["mean"] < 1 and "wikipedia" in found
    told = json.loads((tmp_path / "one" / "training.json").read_text())
    assert told["draft"]["tokens_seen"] == 4096 and "--data DATA --out OUT" in told["draft"]["command"]
    texts = [json.loads(line) for line in (tmp_path / "one" / "gate-heldout.jsonl").read_text().splitlines()]
    assert texts and all(script.heldout.held_out(one["text"]) for one in texts)
