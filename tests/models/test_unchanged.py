"""The check that joined layers are what they were notices every change that would make a call read something else."""

from __future__ import annotations

from collections.abc import Callable

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


def _write(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.add_(1)


CHANGES: dict[str, Callable[[Layer], object]] = {
    "child": lambda layer: setattr(layer, "norm", nn.LayerNorm(4)),
    "no child": lambda layer: delattr(layer, "norm"),
    "more children": lambda layer: layer.mlp.add_module("gate", nn.Linear(4, 8)),
    "grandchild": lambda layer: layer.mlp.update({"up": nn.Linear(4, 8, bias=False)}),
    "weight": lambda layer: setattr(layer.mlp["up"], "weight", nn.Parameter(torch.ones(8, 4))),
    "no weight": lambda layer: setattr(layer.mlp["down"], "bias", None),
    "a bias that was none": lambda layer: setattr(layer.mlp["up"], "bias", nn.Parameter(torch.ones(8))),
    "memory of a weight": lambda layer: setattr(layer.mlp["up"].weight, "data", torch.ones(8, 4)),
    "buffer": lambda layer: setattr(layer.mlp["up"], "table", torch.ones(3)),
    "memory of a buffer": lambda layer: setattr(layer.mlp["up"].table, "data", torch.ones(3)),
    "values of a copied weight": lambda layer: _write(layer.mlp["down"].weight),
    "dtype": lambda layer: layer.mlp["up"].to(torch.float64),
    "hook": lambda layer: layer.register_forward_hook(lambda *_: None),
    "hook before": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "forward": lambda layer: setattr(layer, "forward", print),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_noticed(what: str) -> None:
    layers = [Layer(), Layer()]
    watched = Unchanged(layers)
    assert watched.holds()
    CHANGES[what](layers[1])
    assert not watched.holds()
    assert Unchanged([layers[0]]).holds()


def test_float32_weights_may_be_written_where_they_are() -> None:
    """They are read in place."""
    layer = Layer()
    watched = Unchanged([layer])
    _write(layer.mlp["up"].weight)
    assert watched.holds()


def test_a_hook_that_is_gone_changes_nothing() -> None:
    layer = Layer()
    watched = Unchanged([layer])
    handle = layer.register_forward_hook(lambda *_: None)
    assert not watched.holds()
    handle.remove()
    assert watched.holds()
