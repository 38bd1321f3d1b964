"""scripts/train_builtin.py: a training that was interrupted ends with the weights of one without a break."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.smoke import made_up_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, which compiles nothing and keeps a checkpoint of each step."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("train_builtin")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "CHECKPOINT_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["train_builtin.py", "target", "--data", "/somewhere"])
    return module


def test_an_interrupted_training_goes_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = script.prepare(made_up_data(), tmp_path / "cache", 512, 0)
    assert [d.source for d in data.heldout] and all(d.held_out for d in data.heldout)
    weights = []
    for name, broken in (("whole", False), ("broken", True)):
        args = SimpleNamespace(
            stage="target", preset="tiny", device="cpu", seed=0, tokens=4 * 2048, minutes=None, out=tmp_path / name
        )  # fmt: skip
        args.out.mkdir()
        if broken:
            trainer = script.Trainer(args, data)
            save = trainer.save

            def fail(per_source: int, save: Any = save, trainer: Any = trainer) -> None:
                save(per_source)
                if trainer.done["step"] == 2:
                    raise KeyboardInterrupt

            monkeypatch.setattr(trainer, "save", fail)
            with pytest.raises(KeyboardInterrupt):
                trainer.run()
        last = script.Trainer(args, data)
        assert last.done["step"] == (2 if broken else 0)
        last.run()
        weights.append((args.out / "target" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    (first, second) = last.done["sessions"]
    assert second == {"from_step": 2, "command": "python scripts/train_builtin.py target --data DATA"}
    assert (args.out / "training.json").is_file() and first["from_step"] == 0
