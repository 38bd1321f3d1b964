"""Whether modules are still what they were.

The weights of a forward pass push everything else out of the processor's caches, so that each object that is looked at
before the next one costs a wait for memory: the loops of this check are in C, and look at as few as they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

__all__ = ["Unchanged", "place_of"]

_FOLLOW = ref.__call__
_VARIABLES, _FORWARD = attrgetter("__dict__"), methodcaller("get", "forward")
_HOOKS, _HOOKS_BEFORE = attrgetter("_forward_hooks"), attrgetter("_forward_pre_hooks")
_DTYPE, _WRITTEN = attrgetter("dtype"), attrgetter("_version")


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
