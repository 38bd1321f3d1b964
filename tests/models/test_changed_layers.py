"""Joined layers of a model that was changed, in an environment that was changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.gguf_families import FAMILIES
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers.models.llama.modeling_llama import LlamaMLP

import sprinter
from sprinter.errors import UserError
from sprinter.models.choose import make_runner
from sprinter.models.pair import builtin_paths, load_models
from sprinter.models.quantised.fused_layers import _Forward, _Stack, is_joined
from sprinter.models.quantised.library import kernel
from sprinter.models.quantised.quantise import quantise
from sprinter.models.quantised.unchanged import changed_layer
from sprinter.models.runners.forward import decoder_layers


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
def test_what_stands_in_place_of_a_layer_is_honoured(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    CHANGES[change](model.model)
    text = torch.randint(1, 250, (1, 12))
    seen: list[type] = []
    handle = register_module_forward_hook(lambda module, args, output: seen.append(type(module)))
    if change != "hook for all modules":
        handle.remove()
    try:
        quantise(model, "int8")
    except UserError:
        handle.remove()
        raise

    def passes() -> torch.Tensor:
        rows = make_runner(model, max_len=20)
        made = [rows.extend(part).logits for part in text.split(4, 1)]
        return torch.cat([one for one in made if one is not None], 1)

    found = passes()
    handle.remove()
    assert (LlamaMLP in seen) is (change == "hook for all modules")
    for layer in model.model.modules():
        if isinstance(vars(layer).get("forward"), _Forward):
            del layer.forward
    wanted = passes()
    assert torch.linalg.norm(found - wanted) <= 0.1 * torch.linalg.norm(wanted)


class Lora(nn.Module):
    """As adapters wrap a layer: it registers the same parameter."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.weight, self.base = base.weight, base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3.0 * nn.functional.linear(x, self.weight)


def _wrap(owner: Any, name: str) -> None:
    setattr(owner, name, Lora(getattr(owner, name)))


def _own_forward(part: Any) -> None:
    inner = part.forward
    part.forward = lambda x: 3.0 * inner(x)


IN_LAYERS: dict[str, tuple[Callable[[Any], object], str]] = {
    "lora": (lambda layer: _wrap(layer.mlp, "down_proj"), "mlp.down_proj is of class Lora"),
    "hook": (lambda layer: layer.mlp.register_forward_hook(lambda *a: 3.0 * a[2]), "mlp has a hook"),
    "pre-hook": (
        lambda layer: layer.self_attn.o_proj.register_forward_pre_hook(lambda _, a: (4.0 * a[0],)),
        "self_attn.o_proj has a hook",
    ),
    "forward": (lambda layer: _own_forward(layer.mlp), "mlp has another forward"),
    "activation": (lambda layer: setattr(layer.mlp, "act_fn", nn.Identity()), "mlp.act_fn is of class Identity"),
    "eps": (
        lambda layer: setattr(layer.post_attention_layernorm, "variance_epsilon", 10.0),
        "post_attention_layernorm.variance_epsilon is 10.0",
    ),
    "method": (
        lambda layer: setattr(layer.post_attention_layernorm, "extra_repr", lambda: ""),
        "post_attention_layernorm has another extra_repr",
    ),
    "weight": (
        lambda layer: layer.mlp.register_parameter("more", nn.Parameter(torch.ones(1))), "mlp has a weight more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_LAYERS)
def test_what_stands_in_a_layer_is_honoured(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was passed over in silence: the joined layer took the weights and called no part."""
    change, said = IN_LAYERS[name]
    text = torch.randint(1, 250, (1, 12), generator=torch.Generator().manual_seed(1))

    def logits(changed: bool) -> tuple[Any, torch.Tensor]:
        model = llama()
        if changed:
            change(model.model.layers[1])
        quantise(model, "int8")
        with torch.inference_mode():
            return model, model(text).logits

    kernel()  # what it says while it is compiled is another test's
    caplog.clear()
    _, plain = logits(False)
    assert not caplog.records
    model, found = logits(True)
    assert [isinstance(vars(layer).get("forward"), _Forward) for layer in model.model.layers] == [
        True,
        False,
        True,
    ]
    (record,) = caplog.records
    assert (
        "do not run whole layers" in record.getMessage() and f"model.layers.1.{said}" in record.getMessage()
    )
    monkeypatch.setattr("sprinter.models.quantised.quantise.join_layers", lambda _: 0)
    _, wanted = logits(True)
    assert torch.linalg.norm(found - wanted) <= 0.1 * torch.linalg.norm(wanted)
    assert name in ("method", "weight") or torch.linalg.norm(found - plain) > 0.2 * torch.linalg.norm(plain)


def test_a_class_that_was_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 0.0 * x)
    with pytest.raises(UserError, match=r"mlp has another forward than that of its class; use compile=False"):
        load_models(builtin_paths()["target"], compile=True, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_as_their_classes_make_them_are_unchanged(family: str) -> None:
    model = FAMILIES[family][1]()
    assert changed_layer(model) is None
    layers: Any = decoder_layers(model)
    mlp = layers[1].mlp
    handle = mlp.register_forward_hook(lambda *_: None)
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
    assert is_joined(model) and pair.generate("def f(", **decode).text == before


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
