"""examples/gates: a gate that was trained for a public pair loads, says what it is, and decodes with that pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.real import needs_llama, real_file

import sprinter
from sprinter.heads.gate import load_gate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gates"
QWEN = FOLDER / "qwen2.5-coder-1.5b-0.5b"
FILES = {"README.md", "config.json", "model.safetensors"}


@pytest.mark.parametrize(
    "folder", sorted(path for path in FOLDER.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_gates_load_and_have_a_card(folder: Path) -> None:
    gate = load_gate(folder)
    assert {path.name for path in folder.iterdir()} == FILES
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{config['tau']:.4f}" in card and config["draft_id"].split("/")[-1] in card
    assert "/work" not in card + json.dumps(config) and "/root" not in card + json.dumps(config)
    features = {
        "hidden": torch.zeros(3, config["hidden_size"]),
        "entropy": torch.tensor([0.0, 1.0, 3.0]),
        "max_q": torch.tensor([1.0, 0.6, 0.1]),
        "top_q(k=10)": torch.tensor([[1.0, *[0.0] * 9], [0.6, 0.4, *[0.0] * 8], [0.1] * 10]),
    }
    scores = gate({name: features[name] for name in gate.features})
    assert scores.tolist() == sorted(scores.tolist(), reverse=True), (
        "the surer the draft, the higher the score"
    )


@pytest.mark.real
@needs_llama
def test_the_gate_decodes_with_its_pair() -> None:
    pair = sprinter.load_pair(real_file("qwen"), draft=real_file("qwen-draft"), gate=QWEN)
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    out = pair.generate(messages, method="sprinter", max_new_tokens=40, temperature=0, meter="complete")
    assert isinstance(out, sprinter.Generation)
    assert out.stats.trusted > 10 and out.stats.target_calls < 20
    assert out.stats.mean_drift is not None and out.stats.mean_drift < 0.2
