"""Decoder layers that our kernels run, alone and several in one call."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.gguf_families import FAMILIES, GEMMA, UNWRITTEN, made, written
from tests.models.gguf_files import NO_GGUF
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.choose import make_runner, renew
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.pair import builtin_paths, load_models
from sprinter.models.quantised.fused_layers import _Forward, _Stack, is_joined
from sprinter.models.quantised.quantise import quantise
from sprinter.models.runners.row_cache import RowCache


@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3", "gemma2", "gemma3", "gemma3-alike"])
def test_layers_in_one_call_compute_what_each_does_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, as far as no hook wants to see what is between them; of a copied model too."""
    if name == "gemma3-alike":
        types = ["sliding_attention"] * 3
        model: Any = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA, layer_types=types)).eval()
        quantise(model, "int8")
    else:
        pytest.importorskip("gguf", reason=NO_GGUF)
        written(name, tmp_path / "m.gguf", "Q5_0")
        model = load_models(tmp_path / "m.gguf", dtype="gguf").target.model
    apart = name in ("gemma2", "gemma3")  # neighbours have other masks
    text = torch.randint(1, 250, (3, 30), generator=torch.Generator().manual_seed(0))
    calls: list[int] = []
    together = _Stack.together

    def counted(self: _Stack, first: int, cache: RowCache) -> Any:
        found = together(self, first, cache)
        calls.append(1 if found is None else len(found.facts))
        return found

    monkeypatch.setattr(_Stack, "together", counted)

    def passes(model: PreTrainedModel, layers: tuple[int, ...] = ()) -> list[torch.Tensor]:
        rows: Any = make_runner(model, batch=3, max_len=50, compile=False)
        rows.straight = None  # see test_straight
        made = [rows.extend(text[:, :9], [9, 4, 6])]
        calls.clear()
        made += [rows.extend(text[:, 9:12], hidden_layers=layers)]
        made += [rows.extend(text[:1, 12:14], rows=[1], hidden_layers=layers)]
        made += [rows.extend(text[:, 14:20], [6, 1, 0], hidden_layers=layers)]
        rows.rewind([6, 6, 6])
        made += [rows.extend(text[:, 20:23], hidden_layers=layers)]  # aligned
        branches = [[8, 8, 9, 11], None]
        made += [rows.extend(text[:2, 23:27], rows=[2, 0], parents=branches, hidden_layers=layers)]
        every = [part for one in made for part in (one.logits, one.hidden)]
        return [part for part in every if part is not None]

    whole = passes(model)
    assert calls == ([1, 1, 1] if apart else [3]) * 5
    noted = passes(model, (0, 1))
    assert calls == [1, 1, 1] * 5
    twice = passes(model, (1,))
    assert calls == ([1, 1, 1] if apart else [2, 1]) * 5
    seen: list[torch.Tensor] = []
    note = model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    before = passes(model)
    note.remove()
    assert calls == ([1, 1, 1] if apart else [1, 2]) * 5 and len(seen) == 6
    given: list[torch.Tensor] = []
    note = model.model.layers[1].register_forward_hook(lambda _, args, output: given.append(args[0]))
    passes(model)
    note.remove()
    assert calls == [1, 1, 1] * 5
    assert all(torch.equal(mine, other) for mine, other in zip(given, seen, strict=True))
    twin = deepcopy(model)
    own = passes(twin)
    assert calls == ([1, 1, 1] if apart else [3]) * 5
    monkeypatch.setattr(_Stack, "together", lambda *_: None)
    alone = passes(model)
    for one in (whole, noted, twice, before, own):
        assert len(one) == len(alone) == 12
        assert all(torch.equal(mine, other) for mine, other in zip(one, alone, strict=True))
    monkeypatch.undo()
    with torch.no_grad():
        twin.model.layers[1].input_layernorm.weight *= 3.0
        twin.model.layers[2].post_attention_layernorm.weight = nn.Parameter(torch.full((64,), 0.5))
    renew(twin)
    assert not torch.equal(passes(twin)[2], own[2])
    assert torch.equal(passes(model)[2], whole[2])


@pytest.mark.parametrize("name", UNWRITTEN)
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_matrices_that_are_one_below_the_other_are_read_apart(name: str, dtype: str) -> None:
    """And heads are turned in part; the trial compares with the modules, here to the last bits."""
    model, ids = made(name), torch.arange(1, 31).view(2, 15)
    quantise(model, dtype)
    assert is_joined(model)
    found = model(ids).logits
    for layer in [part for part in model.modules() if isinstance(vars(part).get("forward"), _Forward)]:
        layer.forward = type(layer).forward.__get__(layer)
    assert float((model(ids).logits - found).norm() / found.norm()) < 1e-2


def test_a_linear_layer_that_is_replaced_is_read_after_a_reload() -> None:
    model, other, ids = made("llama"), made("llama-biases"), torch.arange(1, 31).view(2, 15)
    for one in (model, other):
        quantise(one, "int8")
    before = model(ids).logits
    given = other.model.layers[1].self_attn.q_proj
    model.model.layers[1].self_attn.q_proj = given
    renew(model)
    found = model(ids).logits
    assert is_joined(model) and not torch.equal(found, before)
    given.bias = given.bias * 2.0
    torch.randn(1000, 64)  # takes the memory of what was freed
    assert torch.equal(model(ids).logits, found)
    renew(model)
    assert not torch.equal(model(ids).logits, found)
    model.model.layers[1].self_attn.q_proj = nn.Linear(64, 64)
    renew(model)
    assert not is_joined(model) and torch.isfinite(model(ids).logits).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_joined_layers_compute_what_the_modules_do(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason=NO_GGUF)
    written(name, tmp_path / "m.gguf", "Q8_0")
    model = dequantised(tmp_path / "m.gguf", torch.float32, quantised="gguf").model
    joined_layers = [layer for layer in model.model.layers if isinstance(layer.forward, _Forward)]
    assert len(joined_layers) == 3
    layer = model.model.layers[1]
    x = torch.randn(2, 6, 64)
    kind = [layer.self_attn.layer_type] if "gemma3" in name else []
    positions = model.model.rotary_emb(x, torch.arange(6)[None], *kind)
    found = layer(x, position_embeddings=positions)
    layer.forward, joined_one = type(layer).forward.__get__(layer), layer.forward
    wanted = layer(x, position_embeddings=positions)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-2
    layer.forward = joined_one
    twin = deepcopy(model)
    with torch.no_grad():
        twin.model.layers[1].input_layernorm.weight *= 3.0
    with pytest.raises(RuntimeError, match="have no gradients: train on"):
        layer(x.clone().requires_grad_(), position_embeddings=positions)
    assert torch.equal(layer(x, position_embeddings=positions), found)
    changed = twin.model.layers[1](x, position_embeddings=positions)
    assert not torch.allclose(changed, found)
    del model, layer, joined_layers
    assert torch.equal(twin.model.layers[1](x, position_embeddings=positions), changed)
    with pytest.raises(TypeError, match="cannot be pickled: save the one that it was made from"):
        pickle.dumps(joined_one)
    twin = deepcopy(twin).bfloat16()
    with pytest.raises(RuntimeError, match="stays in float32, on the CPU"):
        twin.model.layers[1](x, position_embeddings=positions)


def test_layers_that_compute_something_else_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _Forward._made

    def without_norm(self: _Forward) -> object:
        facts = original(self)
        facts.eps = 1e3
        return facts

    monkeypatch.setattr(_Forward, "_made", without_norm)
    with pytest.raises(UserError, match=r"the joined layers of .* differ from its own"):
        load_models(builtin_paths()["target"], dtype="int8")
