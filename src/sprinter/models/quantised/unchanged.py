"""Whether modules are still what they were.

The weights of a forward pass push everything else out of the processor's caches, so that each object that is looked at
before the next one costs a wait for memory: the loops of this check are in C, and look at as few as they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Unchanged", "place_of"]

_FORWARD = methodcaller("get", "forward")


class Unchanged:
    """What some layers hold: their ``forward``, their children and theirs, the weights of these, and no hook.

    Args:
        layers: modules without hooks.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        owners = [owner for layer in layers for owner in (layer, *layer.children())]
        children = [child for owner in owners for child in owner.children()]
        held: list[dict[str, Any]] = [owner._modules for owner in owners]
        held += [each for child in children for each in (child._parameters, child._buffers)]
        self._tables = [each for each in held if any(one is not None for one in each.values())]
        self._entries = self._now()
        self._weights = [one for one in self._entries if isinstance(one, Tensor)]
        self._addresses = [*map(Tensor.data_ptr, self._weights)]
        self._copied = [(one, place_of(one)) for one in self._weights if one.dtype != torch.float32]
        self._hooks = [each for layer in layers for each in (layer._forward_hooks, layer._forward_pre_hooks)]
        self._own = [layer.__dict__ for layer in layers]
        self._forwards = [*map(_FORWARD, self._own)]

    def _now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._tables))]

    def holds(self) -> bool:
        """Whether all of it is as it was; a weight that is not in float32 counts as written where PyTorch counts it."""
        now = self._now()
        return (
            len(now) == len(self._entries)
            and all(map(is_, now, self._entries))  # tensors have no == of their own
            and [*map(Tensor.data_ptr, self._weights)] == self._addresses
            and all(map(is_, map(_FORWARD, self._own), self._forwards))
            and not any(self._hooks)
            and all(place_of(weight) == place for weight, place in self._copied)
        )


def place_of(weight: Tensor) -> tuple[int, torch.dtype, int]:
    """Where it is, and how often it was written, as far as PyTorch counts that: what is not in float32 is copied."""
    kind = weight.dtype
    return weight.data_ptr(), kind, 0 if kind == torch.float32 or weight.is_inference() else weight._version
