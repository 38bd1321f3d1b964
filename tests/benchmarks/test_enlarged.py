"""benchmarks/enlarged.py: a larger model, the same logits."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_files import tiny_llama
from tests.models.tiny import padded_gpt2

from sprinter.models.pair import builtin_paths, load_models

TOKENS = torch.arange(3, 60).reshape(3, 19)


@pytest.fixture
def enlarged() -> Any:
    """The script as a module."""
    return importlib.import_module("benchmarks.enlarged")


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=str
)
@torch.inference_mode()
def test_the_logits_stay(enlarged: Any, changes: dict[str, bool]) -> None:
    model = tiny_llama(3, **changes)
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    larger = enlarged.enlarge(model, layers=5, intermediate=176)
    assert (larger.config.num_hidden_layers, larger.config.intermediate_size) == (5, 176)
    assert larger.num_parameters() > 2 * model.num_parameters()
    wanted = model(TOKENS).logits
    assert float(wanted.std()) > 0.5
    torch.testing.assert_close(larger(TOKENS).logits, wanted, rtol=0, atol=1e-5)
    assert all(torch.equal(weights, before[name]) for name, weights in model.state_dict().items())
    largest = max(float(layer.mlp.gate_proj.weight.abs().max()) for layer in larger.model.layers[2:])
    assert largest > 0  # only what a layer writes is zero


def test_the_builtin_target_as_a_directory(enlarged: Any, tmp_path: Path) -> None:
    size = enlarged.write_enlarged(builtin_paths()["target"], tmp_path / "large")
    assert 16e6 < size < 18e6
    small, large = (load_models(path).target for path in (builtin_paths()["target"], tmp_path / "large"))
    assert large.size == size and large.eos_ids == small.eos_ids and large.context == small.context
    with torch.inference_mode():
        wanted, found = (each.module("a test")(TOKENS).logits for each in (small, large))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    assert load_models(tmp_path / "large", builtin_paths()["draft"]).draft is not None


def test_what_cannot_be_enlarged(enlarged: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 2 and 80"):
        enlarged.enlarge(tiny_llama(), layers=1, intermediate=80)
    with pytest.raises(ValueError, match="only a Llama"):
        enlarged.enlarge(padded_gpt2(64), layers=3, intermediate=80)
