"""Detects whether what was captured of a module is still valid.

A CUDA graph has a module's classes, plain attributes and hooks frozen into it, and the addresses of its weights. It is
invalid as soon as one of these changes.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig, PreTrainedModel

from sprinter.models.runners.forward import NOTING

__all__ = [
    "NOT_READ", "Momentary", "Watch", "comparable", "hooks_everywhere", "hooks_of", "places",
]  # fmt: skip

_WHOLE = 4096
"""Maximum number of elements of a tensor of which all are checked."""

_EVERY = 61
"""Of longer tensors one element in 61 is checked: a prime, so that every column of a matrix is sampled."""

NOT_READ = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "_is_hf_initialized"}
"""Attributes that do not affect what a module computes, or that are read separately."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Watch:
    """Detects that a module has changed since code was captured from it.

    Torch counts writes to a tensor (``load_state_dict``, an optimizer's step); a tensor, a submodule or a plain
    attribute that is replaced is another object. Writes through ``.data`` or NumPy and to inference tensors are not
    counted. They are detected in the elements: all are checked in tensors of up to 4096 elements, one in 61 in longer
    ones. A change of a few elements may go unnoticed; a change of a whole row or column of a large matrix does not.

    On other devices than the CPU, elements are not read: such writes are missed there.

    A check costs about a fifth of an eager forward pass, so it is made when a text begins, not at each forward pass.

    Args:
        contents: True: detect changes of weights, for compiled code; False: only of their addresses, for CUDA graphs.
        rotary: whether to read rotary embeddings. Some models change theirs with the length of the text; the
            configuration, which they follow from, is always read.
    """

    def __init__(self, contents: bool = True, rotary: bool = True) -> None:
        self._contents, self._rotary = contents, rotary
        self._places: Hashable = None
        self._written: Hashable = None
        self._samples: list[np.ndarray] = []

    def changed(self, module: nn.Module) -> bool:
        """Whether the module has changed since the last call; True at the first."""
        before = self._places, self._written
        held, tensors = _identity(module, self._rotary)
        self._places = (*held, *[(x.data_ptr(), x.shape, x.stride()) for x in tensors])
        if self._contents:
            if self._places != before[0]:
                self._samples = [_sample(x) for x in tensors if x.device.type == "cpu"]
            counted = [-1 if x.is_inference() else x._version for x in tensors]
            self._written = (*counted, *[hash(sample.tobytes()) for sample in self._samples])
        return before != (self._places, self._written)


class Momentary:
    """Base class of what a module has in the place of its ``forward`` while it is captured, which is no change."""


def _identity(module: nn.Module, rotary: bool) -> tuple[list[Hashable], list[Tensor]]:
    """Classes and object ids of all submodules and their attributes, and their tensors."""
    held: list[Hashable] = []
    tensors: list[Tensor] = []
    waiting: list[nn.Module | None] = [module]
    while waiting:
        part = waiting.pop()
        if part is None:
            continue
        if rotary or part._parameters or not hasattr(part, "inv_freq"):
            # Copied to a list first: another thread may be capturing the model, and replace a forward meanwhile.
            own_values = [id(one) for one in list(vars(part).values()) if not isinstance(one, Momentary)]
            held += (id(type(part)), *own_values, *hooks_of(part))
            for own in (part._parameters, part._buffers):
                if own:
                    tensors += [x for x in own.values() if x is not None]
        waiting += part._modules.values()
    config = getattr(module, "config", None)
    return [*held, _settings(config), *hooks_everywhere()], tensors


def hooks_of(part: nn.Module) -> list[Hashable]:
    """Ids of the hooks that may change what a submodule computes; torch never uses the same id twice."""
    return _foreign(part._forward_hooks) + _foreign(part._forward_pre_hooks)


def hooks_everywhere() -> list[Hashable]:
    """Ids of such hooks that were registered for all modules."""
    return _foreign(torch_module._global_forward_hooks) + _foreign(torch_module._global_forward_pre_hooks)


def _foreign(hooks: dict[int, Any]) -> list[Hashable]:
    # Copied to a list first: another thread may register and remove its own hook meanwhile.
    return [
        (number, id(hook))
        for number, hook in (list(hooks.items()) if hooks else ())
        if getattr(hook, "__module__", None) not in NOTING
    ]


def _sample(x: Tensor) -> np.ndarray:
    """The elements that are checked, as bits; a view of the tensor's memory."""
    bits = x.detach().view(_BITS[x.element_size()])
    if bits.dim() == 2 and not bits.is_contiguous():
        bits = bits.t()  # as ``in_place`` lays weights out; otherwise this would be a copy
    flat = bits.numpy().reshape(-1)
    return flat[:: 1 if flat.size <= _WHOLE else _EVERY]


def places(module: nn.Module) -> Hashable:
    """Classes and plain attributes of a module and the addresses of its weights: equal for modules that share them."""
    facts, tensors = _read(module)
    return tuple(facts), tuple((x.data_ptr(), x.shape, x.stride()) for _, x in tensors)


def _read(module: nn.Module) -> tuple[list[Hashable], list[tuple[str, Tensor]]]:
    """Classes and plain attributes of a module's submodules, and all their tensors by name."""
    facts: list[Hashable] = []
    tensors: list[tuple[str, Tensor]] = []
    for path, part in module.named_modules(remove_duplicate=False):
        facts += [
            path,
            _name(type(part)),
            _name(type(part).forward),
            *hooks_of(part),
        ]
        held = [*part._parameters.items(), *part._buffers.items()]
        for name, value in vars(part).items():
            if name in NOT_READ or (name[0] == "_" and isinstance(part, PreTrainedModel)):
                continue  # transformers' own records of how a model was loaded
            if isinstance(value, Tensor):
                held.append((name, value))
            else:
                facts.append((name, comparable(value)))
        tensors += [(f"{path}.{name}", value) for name, value in held if value is not None]
    return [*facts, *hooks_everywhere()], tensors


def _settings(config: Any) -> Hashable:
    """The entries of a config that its model may read: not its origin, nor what tracing changes for a moment."""
    if not isinstance(config, PretrainedConfig):
        return None
    return tuple((name, comparable(value)) for name, value in sorted(vars(config).items()) if name[0] != "_")


_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def comparable(value: Any) -> Hashable:
    """A value in comparable, printable form; for other objects their class."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(comparable, value))
    if isinstance(value, dict):
        return tuple((comparable(key), comparable(held)) for key, held in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(comparable(held)) for held in value))
    if isinstance(value, PretrainedConfig):
        return _settings(value)
    if isinstance(value, partial):
        return comparable((value.func, value.args, value.keywords))
    return _name(value) if hasattr(value, "__qualname__") else _name(type(value))


def _name(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"
