"""Joined layers of a model that was changed, in an environment that was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.gguf_families import FAMILIES
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from sprinter.errors import UserError
from sprinter.models.pair import builtin_paths, load_models
from sprinter.models.quantised.quantise import quantise
from sprinter.models.quantised.whole import _Forward, _Stack, is_joined
from sprinter.models.runner import make_runner
from sprinter.models.runners.row import RowRunner


def llama() -> Any:
    """Three layers, with weights that are the same each time."""
    torch.manual_seed(0)
    return FAMILIES["llama"][1]().eval()


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def __getattr__(self, name: str) -> Any:
        return self.__dict__[name] if name in self.__dict__ else super().__getattr__(name)

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return 0.5 * self.inner(hidden_states, **others)


def doubled(layer: nn.Module) -> None:
    inner = layer.forward
    layer.forward = lambda x, **others: 2.0 * inner(x, **others)


CHANGES: dict[str, Callable[[Any], object]] = {
    "wrapped": lambda base: base.layers.__setitem__(1, Wrapped(base.layers[1])),
    "forward wrapped": lambda base: doubled(base.layers[1]),
    "last left out": lambda base: setattr(base.config, "num_hidden_layers", 2),
    "middle left out": lambda base: base.layers.__delitem__(1),
    "hook for all modules": lambda base: None,
    "another list": lambda base: setattr(base, "layers", nn.ModuleList([base.layers[0], base.layers[2]])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_are_changed_later_are_not_passed_over(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    quantise(model, "int8")
    CHANGES[change](model.model)
    text = torch.randint(1, 250, (1, 12))
    seen: list[type] = []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    if change != "hook for all modules":
        handle.remove()

    def passes() -> torch.Tensor:
        rows = RowRunner(model, 1, 20, {"": None})
        made = [rows.extend(part).logits for part in text.split(4, 1)]
        return torch.cat([one for one in made if one is not None], 1)

    found = passes()
    handle.remove()
    assert seen.count(LlamaDecoderLayer) == (9 if change == "hook for all modules" else 0)
    monkeypatch.setattr(_Stack, "together", lambda *_: None)
    assert torch.equal(found, passes())


def test_a_layer_between_that_is_not_quantised_is_not_passed_over() -> None:
    class Own(nn.Linear):
        pass

    model = llama()
    attention = model.model.layers[1].self_attn
    mine = Own(64, 64, bias=False)
    mine.weight = attention.q_proj.weight
    attention.q_proj = mine
    quantise(model, "int8")
    assert [isinstance(layer.forward, _Forward) for layer in model.model.layers] == [True, False, True]
    assert not is_joined(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_passes_do_not_depend_on_the_default_device(device: str) -> None:
    model = load_models(builtin_paths()["target"], dtype="int8").target.model
    text = torch.randint(1, 250, (2, 12), generator=torch.Generator().manual_seed(0))
    rows = make_runner(model, batch=2, max_len=40, compile=False)

    def passes() -> list[torch.Tensor | None]:
        rows.rewind([0, 0])
        every = [(text[:, :4], [4, 4]), (text[:, 4:7], [3, 3]), (text[:, 7:], [5, 1]), (text[:, :1], [1, 1])]
        return [rows.extend(part, counts).logits for part, counts in every]

    wanted = passes()
    with torch.device(device):
        found = passes()
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))  # type: ignore[arg-type]


def test_calls_that_differ_from_the_layers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _Stack.together

    def the_first_twice(*given: Any) -> Any:
        if call := original(*given):
            call.facts[1] = call.facts[0]
        return call

    monkeypatch.setattr(_Stack, "together", the_first_twice)
    with pytest.raises(UserError, match=r"tokens of .* differ between forward passes"):
        load_models(builtin_paths()["target"], dtype="int8")
