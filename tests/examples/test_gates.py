"""examples/gates and heads: what was trained for a public pair loads, says what it is, and decodes with that pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.real import needs_llama, real_file

import sprinter
from sprinter.heads.artifact import load_head
from sprinter.heads.load import load_gate

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "gates"
QWEN = FOLDER / "qwen2.5-coder-1.5b-0.5b"
HEADS = FOLDER.parent / "heads"
FILES = {"README.md", "config.json", "model.safetensors"}


def described(folder: Path) -> tuple[dict[str, Any], str]:
    """Config and card of a folder that holds the three files, and names no path of the machine that made it."""
    assert {path.name for path in folder.iterdir()} == FILES
    config, card = ((folder / name).read_text(encoding="utf-8") for name in ("config.json", "README.md"))
    assert not any(path in config + card for path in ("/work", "/root", "/home", "/tmp"))
    return json.loads(config), card


@pytest.mark.parametrize(
    "folder", sorted(path for path in FOLDER.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_gates_load_and_have_a_card(folder: Path) -> None:
    gate, (config, card) = load_gate(folder), described(folder)
    assert f"{config['tau']:.4f}" in card and config["draft_id"].split("/")[-1] in card
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


@pytest.mark.parametrize(
    "folder", sorted(path for path in HEADS.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_heads_load_and_have_a_card(folder: Path) -> None:
    head, (config, card) = load_head(folder), described(folder)
    assert folder.name.endswith(config["kind"])
    assert config["target_id"].split("/")[-1] in card and "AU-ROC" in card
    states = torch.randn(5, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    read = {
        "hidden": 4 * states,  # about as large as the target's own
        "top_q(k=10)": torch.linspace(0.02, 0.1, 5)[:, None].expand(5, 10),
        "entropy": torch.linspace(0, 3, 5),
        "position": torch.zeros(5),
    }
    scores = head({name: read[name] for name in head.features})
    assert (
        scores.shape == (5,) and bool(((scores >= 0) & (scores <= 1)).all()) and len(set(scores.tolist())) > 1
    )


@pytest.mark.real
def test_the_judge_spares_what_exact_acceptance_refuses() -> None:
    pair = sprinter.load_pair(
        real_file("qwen"), draft=real_file("qwen-draft"), heads=[HEADS / "qwen2.5-coder-1.5b-0.5b-judge"],
        runner="torch", dtype="gguf",
    )  # fmt: skip
    question = "Describe a walk through an old harbour town."
    messages = [{"role": "user", "content": question}]
    options = {"max_new_tokens": 64, "temperature": 0.0, "meter": "complete"}
    exact = pair.generate(messages, method="speculative(gamma=5)", **options)
    freed = pair.generate(messages, method="judge(threshold=0, gamma=5)", **options)
    strict = pair.generate(messages, method="judge(threshold=1, gamma=5)", **options)
    assert isinstance(exact, sprinter.Generation) and isinstance(freed, sprinter.Generation)
    assert strict.text == exact.text and exact.stats.mean_drift == 0
    assert freed.stats.target_calls < exact.stats.target_calls and freed.text != exact.text


@pytest.mark.real
@needs_llama
def test_the_gate_decodes_with_its_pair() -> None:
    pair = sprinter.load_pair(real_file("qwen"), draft=real_file("qwen-draft"), gate=QWEN)
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    out = pair.generate(messages, method="sprinter", max_new_tokens=40, temperature=0, meter="complete")
    assert isinstance(out, sprinter.Generation)
    assert out.stats.trusted > 10 and out.stats.target_calls < 20
    assert out.stats.mean_drift is not None and out.stats.mean_drift < 0.2
