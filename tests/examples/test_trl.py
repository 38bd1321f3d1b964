"""examples/trl: the hook gives what TRL reads, and its pair follows the trainer's weights."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sprinter

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "trl" / "grpo.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's names, TRL and datasets being absent from the development environment."""
    names = {"trl": ("GRPOConfig", "GRPOTrainer"), "datasets": ("Dataset",)}
    for name, wanted in names.items():
        module = types.ModuleType(name)
        vars(module).update(dict.fromkeys(wanted, object))
        monkeypatch.setitem(sys.modules, name, module)
    found: dict[str, Any] = {"__name__": "grpo"}
    exec(compile(SCRIPT.read_text(encoding="utf-8"), str(SCRIPT), "exec"), found)
    return found


def test_the_hook(example: dict[str, Any]) -> None:
    pair = sprinter.load_pair(dtype="float32")
    path = sprinter.builtin_paths()["target"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    state = SimpleNamespace(global_step=0)
    trainer = SimpleNamespace(
        state=state, model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model)
    )
    rollouts = example["Rollouts"](pair, max_new_tokens=8)
    prompts = [example["PROMPTS"][0]] * 2
    texts = []
    for step in (0, 1):
        state.global_step = step
        out = rollouts(prompts, trainer)
        texts.append(out["completion_ids"])
        assert out.keys() == {"prompt_ids", "completion_ids", "logprobs"}
        assert [len(one) for one in out["logprobs"]] == [len(one) for one in out["completion_ids"]]
        assert (
            out["prompt_ids"][0] == out["prompt_ids"][1]
            and out["completion_ids"][0] != out["completion_ids"][1]
        )
        with torch.no_grad():
            model.model.norm.weight.mul_(0.5)
    assert rollouts.largest_difference < 1e-3, "those of the trainer's weights, also after its step"
    assert texts[0] != texts[1] and len(rollouts.target_calls) == 2
    rewards = example["short_words"](["a cat sat", "elephants remember", ""])
    assert rewards == [1.0, 0.0, 0.0]
