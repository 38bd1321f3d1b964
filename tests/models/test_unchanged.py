"""The check that joined layers are what they were notices every change that would make a call read something else."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn

from sprinter.models.quantised.unchanged import Unchanged


class Layer(nn.Module):
    """A layer with children and theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.ModuleDict({"up": nn.Linear(4, 8, bias=False), "down": nn.Linear(8, 4).bfloat16()})
        self.mlp["up"].register_buffer("table", torch.ones(3))
        self.norm.register_buffer("nothing", None)
        self.bare = nn.LayerNorm(4, elementwise_affine=False)
        self.forward = partial(print, self)  # a cycle, as joined layers are


def _write(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


def _swap(modules: nn.ModuleDict) -> None:
    """The same modules in the same order, by each other's names."""
    up, down = modules.pop("up"), modules.pop("down")
    modules["down"], modules["up"] = up, down


def _hook_in_a_new_table(layer: Layer) -> None:
    layer._forward_hooks = OrderedDict()
    layer.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "child": lambda layer: setattr(layer, "norm", nn.LayerNorm(4)),
    "no child": lambda layer: delattr(layer, "norm"),
    "more children": lambda layer: layer.mlp.add_module("gate", nn.Linear(4, 8)),
    "grandchild": lambda layer: layer.mlp.update({"up": nn.Linear(4, 8, bias=False)}),
    "names": lambda layer: _swap(layer.mlp),
    "weight": lambda layer: setattr(layer.mlp["up"], "weight", nn.Parameter(torch.ones(8, 4))),
    "no weight": lambda layer: setattr(layer.mlp["down"], "bias", None),
    "a bias that was none": lambda layer: setattr(layer.mlp["up"], "bias", nn.Parameter(torch.ones(8))),
    "memory of a weight": lambda layer: setattr(layer.mlp["up"].weight, "data", torch.ones(8, 4)),
    "buffer": lambda layer: setattr(layer.mlp["up"], "table", torch.ones(3)),
    "memory of a buffer": lambda layer: setattr(layer.mlp["up"].table, "data", torch.ones(3)),
    "values of a copied weight": lambda layer: _write(layer.mlp["down"].bias),
    "dtype": lambda layer: layer.mlp["up"].to(torch.float64),
    "dtype at the same address": lambda layer: setattr(
        layer.mlp["up"].weight, "data", layer.mlp["up"].weight.data.view(torch.bfloat16)[:, :4]
    ),
    "a weight where there was none": lambda layer: setattr(layer.bare, "weight", nn.Parameter(torch.ones(4))),
    "hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "hook in a new table": _hook_in_a_new_table,
    "hook before": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "forward": lambda layer: setattr(layer, "forward", print),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_noticed(what: str) -> None:
    layers = [Layer(), Layer()]
    watched = Unchanged(layers)
    assert watched.holds(layers)
    CHANGES[what](layers[1])
    assert not watched.holds(layers)


def test_other_layers_are_noticed() -> None:
    layers = [Layer(), Layer()]
    watched = Unchanged(layers)
    assert not watched.holds([layers[0], Layer()])
    assert not watched.holds(layers[::-1])
    assert not watched.holds(layers[:1])
    assert not watched.holds([*layers, Layer()])


def test_layers_are_not_kept_in_memory() -> None:
    """Joined layers hold what checks them: their weights must go with them, before the garbage is collected."""
    layer = Layer()
    del layer.forward
    layer.__dict__["forward"] = own = partial(print)
    own.__dict__["watched"] = Unchanged([layer])  # type: ignore[attr-defined]
    weight = ref(layer.mlp["up"])
    gc.disable()
    try:
        del layer, own
        assert weight() is None
    finally:
        gc.enable()


def test_float32_weights_may_be_written_where_they_are() -> None:
    """They are read in place."""
    layer = Layer()
    watched = Unchanged([layer])
    _write(layer.mlp["up"].weight)
    assert watched.holds([layer])


def test_a_hook_that_is_gone_changes_nothing() -> None:
    layer = Layer()
    watched = Unchanged([layer])
    handle = layer.register_forward_hook(lambda *_: None)
    assert not watched.holds([layer])
    handle.remove()
    assert watched.holds([layer])
