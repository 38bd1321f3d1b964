"""Whether decoder layers are what their class makes of a config, and still are what they were.

The kernels compute what a layer's class computes, and run no code of its parts: whatever else is found there, an
adapter, a hook, another activation, is found by ``changed_part`` when a model is loaded, and such a layer is left to
its own modules.

The second check, ``Unchanged``, is made before each forward pass. The weights of a pass push everything else out of the
processor's caches, so that each object that is looked at before the next one costs a wait for memory: the loops of this
check are in C, and look at as few as they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sprinter.models.capture.marks import NOT_READ, comparable, hooks_of
from sprinter.models.quantised.families import FAMILIES
from sprinter.models.quantised.layers import QuantisedLinear, RoundedLinear
from sprinter.models.quantised.norm import Instead

__all__ = ["Unchanged", "changed_layer", "changed_part", "place_of"]

_PLAIN = (nn.Linear, Conv1D)
_LINEAR = (*_PLAIN, QuantisedLinear, RoundedLinear)

_FOLLOW = ref.__call__
_VARIABLES, _FORWARD = attrgetter("__dict__"), methodcaller("get", "forward")
_HOOKS, _HOOKS_BEFORE = attrgetter("_forward_hooks"), attrgetter("_forward_pre_hooks")
_DTYPE, _WRITTEN = attrgetter("dtype"), attrgetter("_version")


def changed_layer(model: nn.Module, joined: bool = False) -> str | None:
    """The first layer of ``FAMILIES`` with a part that is not what its class makes, and what it is, in words.

    Args:
        joined: of the layers that the kernels run; else of all others.
    """
    for path, layer in model.named_modules():
        family, own = FAMILIES.get(type(layer)), vars(layer).get("forward")
        if family is None or isinstance(own, Instead) is not joined:
            continue
        if not family.is_whole(layer):
            return f"the attention of {path} is not that of its class"
        if (why := changed_part(layer, family.usual(layer))) is not None:
            return f"{path}.{why}"
    return None


def changed_part(layer: nn.Module, usual: nn.Module) -> str | None:
    """What parts of a layer compute, or note, besides what their classes do, in words; None: nothing.

    Hooks on the layer itself are the caller's matter, values of weights are nobody's.

    Args:
        usual: a layer that the class makes of the same config (``LayerFamily.usual``).
    """
    wanted, found = dict(usual.named_modules()), dict(layer.named_modules())
    for path, part in found.items():
        like, name = wanted.get(path), path or "layer"
        if like is None:
            return f"{name} is not a part of {type(layer).__name__}"
        plain = type(like) in _PLAIN
        if type(part) is not type(like) and not (plain and type(part) in _LINEAR):
            return f"{name} is of class {type(part).__name__}, not {type(like).__name__}"
        if path and hooks_of(part):
            return f"{name} has a hook"
        own = part.__dict__.get("forward")
        if (own is not None and not isinstance(own, Instead)) or not _is_its_own(type(part)):
            return f"{name} has another forward than that of its class"
        if why := _changed_values(part, like, plain):
            return f"{name}{why}"
    missing = next((path for path in wanted if path not in found), None)
    return None if missing is None else f"{missing} is gone"


def _is_its_own(cls: type) -> bool:
    """Whether ``forward`` of a class was written there, not put there by another library."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    forward = vars(owner)["forward"]
    written = (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None))
    return written == (owner.__module__, f"{owner.__qualname__}.forward")


def _changed_values(part: Any, like: Any, linear: bool) -> str | None:
    """What differs in the plain attributes and names of weights of two modules of one class."""
    weights = {name for name, one in part._parameters.items() if one is not None}
    known = {"weight", "bias"} if linear else set(like._parameters)
    if more := sorted(weights - known):
        return f" has a weight {more[0]}"
    needed = {name for name, one in like._parameters.items() if one is not None} - {"bias"}
    if type(part) in (QuantisedLinear, RoundedLinear):
        return None
    if less := sorted(needed - weights):
        return f" has no weight {less[0]} of its own"
    if linear:
        return None
    for name, value in vars(like).items():
        if name in NOT_READ or isinstance(value, Tensor):
            continue
        one, other = comparable(vars(part).get(name)), comparable(value)
        if one != other:
            return f".{name} is {one}, not {other}"
    for name in vars(part).keys() - vars(like).keys() - {"forward"}:
        if callable(getattr(type(part), name, None)):
            return f" has another {name} than that of its class"
    return None


class Unchanged:
    """What some layers are: modules without hooks, with a ``forward`` of their own, their children and grandchildren,
    and the weights and buffers of these.

    Layers and ``forward`` are held weakly, as what they hold may hold this.

    Args:
        layers: the modules.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = [*map(ref, layers)]
        self._forwards = [ref(layer.__dict__["forward"]) for layer in layers]
        owners = [owner for layer in layers for owner in (layer, *layer.children())]
        children = [child for owner in owners for child in owner.children()]
        tables: list[dict[str, Any]] = [owner._modules for owner in owners]
        tables += [child._parameters for child in children]
        tables += [child._buffers for child in children if [*child.buffers(recurse=False)]]
        self._tables = [table for table in tables if table]
        self._names, self._entries = [*chain.from_iterable(self._tables)], self._now()
        self._weights = [one for one in self._entries if isinstance(one, Tensor)]
        self._dtypes = [*map(_DTYPE, self._weights)]
        self._addresses = [*map(Tensor.data_ptr, self._weights)]
        # Of norms and biases in other dtypes there are copies; matrices are read where they are.
        self._copied = [
            one
            for one in self._weights
            if one.dtype != torch.float32 and one.dim() < 2 and not one.is_inference()
        ]
        self._written = [*map(_WRITTEN, self._copied)]

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether these layers are those, and all of it is as it was.

        Weights may have been written where they are; norms and biases that are not in float32 count as changed then,
        where PyTorch counts that.
        """
        now = self._now()
        return (
            len(layers) == len(self._layers)
            and all(map(is_, map(_FOLLOW, self._layers), layers))
            and all(map(is_, map(_FOLLOW, self._forwards), map(_FORWARD, map(_VARIABLES, layers))))
            and not any(map(_HOOKS, layers))
            and not any(map(_HOOKS_BEFORE, layers))
            and len(now) == len(self._entries)
            and all(map(is_, now, self._entries))  # == of tensors compares their numbers
            and [*chain.from_iterable(self._tables)] == self._names
            and [*map(Tensor.data_ptr, self._weights)] == self._addresses
            and [*map(_DTYPE, self._weights)] == self._dtypes
            and [*map(_WRITTEN, self._copied)] == self._written
        )


def place_of(weight: Tensor) -> tuple[int, torch.dtype, int]:
    """Where it is, and how often it was written, as far as PyTorch counts that and it is not in float32: of norms and
    biases in other dtypes there are copies."""
    kind = weight.dtype
    return weight.data_ptr(), kind, 0 if kind == torch.float32 or weight.is_inference() else weight._version
