"""Finds the text length at which a rotary embedding changes, by calling it.

transformers takes the largest position of a forward pass as the length of the text ("longrope" and "dynamic" in
``modeling_rope_utils.dynamic_rope_update``; also Phi-MoE's scale). Beyond a certain length all keys of the text are
rotated differently.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["find_switch"]

_FAR = 1 << 20
"""A length at which every known embedding has changed."""

_Rotate = Callable[[int], tuple[Tensor, ...]]


def find_switch(model: PreTrainedModel) -> int | None:
    """Maximum length of a text that is embedded like the shortest, in tokens; None: the length changes nothing."""
    rotations = list(chain.from_iterable(map(_rotations, model.modules())))
    with torch.no_grad():
        switches = [at for rotate in rotations if (at := _last_before_change(rotate)) is not None]
        for rotate in rotations:
            rotate(_SHORTEST)  # "dynamic" remembers the longest
    return min(switches, default=None)


_SHORTEST = 2


def _rotations(module: nn.Module) -> Iterator[_Rotate]:
    """Functions from a text length to the module's embedding of position 1, one per layer type.

    Yields nothing if the module is not a rotary embedding, that is, a leaf without weights that accepts positions.
    """
    takes = list(inspect.signature(module.forward).parameters)
    if takes[:2] != ["x", "position_ids"] or any(True for _ in module.parameters()):
        return
    types = getattr(module, "rope_type", None) if "layer_type" in takes else None
    for kind in types if isinstance(types, dict) else (None,):
        yield partial(_rotate, module, {} if kind is None else {"layer_type": kind})


def _rotate(module: nn.Module, settings: dict[str, str], length: int) -> tuple[Tensor, ...]:
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    x = torch.zeros(1, 1, device=device)
    for last in (1, length - 1):  # the shortest first: it resets what "dynamic" remembers
        made = module(x, position_ids=torch.tensor([[1, last]], device=device), **settings)
    return tuple(part[:, 0].clone() for part in ((made,) if isinstance(made, Tensor) else made))


def _last_before_change(rotate: _Rotate) -> int | None:
    base = rotate(_SHORTEST)

    def changed(length: int) -> bool:
        return not all(map(torch.equal, rotate(length), base))

    return bisect_left(range(_FAR), True, _SHORTEST, key=changed) - 1 if changed(_FAR) else None
