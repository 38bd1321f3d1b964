"""What stands in a model's layers when it is loaded is decoded with, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.gguf_families import FAMILIES, OURS
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaMLP

import sprinter
from sprinter.errors import UserError
from sprinter.models.choose import exactness, make_runner
from sprinter.models.kernels import compile_layers, quantise, runs
from sprinter.models.pair import builtin_paths, load_models
from sprinter.models.runners.forward import decoder_layers

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels.unchanged import changed_layer

TEXT = torch.randint(1, 250, (1, 12), generator=torch.Generator().manual_seed(1))


def llama() -> Any:
    """Three layers, with weights that are the same each time."""
    torch.manual_seed(0)
    return FAMILIES["llama"][1]().eval()


class Wrapped(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return self.__dict__[name] if name in self.__dict__ else super().__getattr__(name)

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        return 0.5 * self.inner(hidden_states, **others)


class Lora(nn.Module):
    """As adapters wrap a linear layer: it registers the same parameter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.weight, self.base = base.weight, base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * nn.functional.linear(x, self.weight)


def _own_forward(part: Any) -> None:
    inner = part.forward
    part.forward = lambda *given, **named: 3.0 * inner(*given, **named)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "wrapped": (lambda base: base.layers.__setitem__(1, Wrapped(base.layers[1])), "Wrapped"),
    "forward of a layer": (lambda base: _own_forward(base.layers[1]), "layers.1.layer has another forward"),
    "last left out": (lambda base: setattr(base.config, "num_hidden_layers", 2), "its list of layers"),
    "middle left out": (lambda base: base.layers.__delitem__(1), "its list of layers"),
    "lora": (
        lambda base: setattr(base.layers[1].mlp, "down_proj", Lora(base.layers[1].mlp.down_proj)),
        "mlp.down_proj is of class Lora",
    ),
    "hook": (lambda base: base.layers[1].mlp.register_forward_hook(lambda *a: 3.0 * a[2]), "mlp has a hook"),
    "pre-hook": (
        lambda base: base.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, a: (4.0 * a[0],)),
        "self_attn.o_proj has a hook",
    ),
    "forward": (lambda base: _own_forward(base.layers[1].mlp), "mlp has another forward"),
    "activation": (
        lambda base: setattr(base.layers[1].mlp, "act_fn", nn.Identity()), "mlp.act_fn is of class Identity"),
    "eps": (
        lambda base: setattr(base.layers[1].post_attention_layernorm, "variance_epsilon", 10.0),
        "post_attention_layernorm.variance_epsilon is 10.0",
    ),
    "method": (
        lambda base: setattr(base.layers[1].post_attention_layernorm, "extra_repr", lambda: ""),
        "post_attention_layernorm has another extra_repr",
    ),
    "weight": (
        lambda base: base.layers[1].mlp.register_parameter("more", nn.Parameter(torch.ones(1))),
        "mlp has a weight more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_stands_in_a_model_is_honoured(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The kernels would pass over it: with 8 bits transformers runs the model, without it is refused."""
    change, said = CHANGES[name]
    model, same = llama(), llama()
    for one in (model, same):
        change(one.model)
    assert said in (compile_layers(same) or "") and not runs(same)
    quantise(model, "int8")
    assert not runs(model) and exactness(model) == "up to rounding"
    (line,) = [one.getMessage() for one in caplog.records if one.name == "sprinter"]
    assert "alone, which is slower" in line and said in line
    with torch.inference_mode():
        wanted = same(TEXT).logits
    found = make_runner(model, max_len=20).extend(TEXT).logits
    assert found is not None and torch.linalg.norm(found - wanted) <= 0.1 * torch.linalg.norm(wanted)


def test_a_hook_for_all_modules_runs() -> None:
    model, seen = llama(), list[type]()
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    try:
        assert compile_layers(model) == "there is a hook for all modules"
        make_runner(model, max_len=20).extend(TEXT)
    finally:
        handle.remove()
    assert LlamaMLP in seen and compile_layers(model) is None


def test_a_class_that_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 0.0 * x)
    with pytest.raises(UserError, match=r"mlp has another forward than that of its class; use compile=False"):
        load_models(builtin_paths()["target"], compile=True, dtype="float32")


@pytest.mark.parametrize("family", OURS)
def test_layers_as_their_classes_make_them_are_unchanged(family: str) -> None:
    model = FAMILIES[family][1]()
    assert changed_layer(model) is None
    layers: Any = decoder_layers(model)
    handle = layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "mlp has a hook" in (changed_layer(model) or "")
    handle.remove()
    assert changed_layer(model) is None


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"compile": True}])
def test_what_is_put_into_a_layer_later_is_seen_after_a_reload(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    pair = sprinter.load_pair(**options)
    decode = {"method": "speculative(gamma=3)", "max_new_tokens": 8, "temperature": 0}
    model: Any = pair.models.target.model
    before = pair.generate("def f(", **decode).text
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    caplog.clear()
    pair.reload()
    assert "layers.1.mlp has a hook" in caplog.text
    pair.generate("def f(", **decode)
    assert seen
    handle.remove()
    pair.reload()
    assert runs(model) and pair.generate("def f(", **decode).text == before


def test_a_layer_that_is_not_quantised_keeps_its_own_class() -> None:
    class Own(nn.Linear):
        pass

    model = llama()
    attention = model.model.layers[1].self_attn
    mine = Own(64, 64, bias=False)
    mine.weight = attention.q_proj.weight
    attention.q_proj = mine
    quantise(model, "int8")
    assert attention.q_proj is mine and not runs(model)
