"""Whether decoder layers are what their class makes of a config.

The kernels compute what a layer's class computes, and run no code of its parts: whatever else is found there, an
adapter, a hook, another activation, is found here when a model is loaded, and keeps the kernels off the whole model. A
pair is frozen then: nothing is looked at again before it is reloaded.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from sprinter_kernels.families import FAMILIES
from sprinter_kernels.layers import QuantisedLinear, RoundedLinear

__all__ = ["changed_layer", "hooks_everywhere", "hooks_of"]

_NOT_READ = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "_is_hf_initialized"}
"""Attributes that do not affect what a module computes, or that are read separately."""

_NOTING = ("sprinter.models.runners.", "transformers.utils.output_capturing")
"""Modules whose hooks only record values and change nothing, by how their names begin."""
_PLAIN = (nn.Linear, Conv1D)
_LINEAR = (*_PLAIN, QuantisedLinear, RoundedLinear)


def changed_layer(model: nn.Module) -> str | None:
    """The first layer of ``FAMILIES`` that has a part that its class does not make: which part, and what it is, in
    words; None: there is no such layer.
    """
    if hooks_everywhere():
        return "there is a hook for all modules"
    for path, layer in model.named_modules():
        if (family := FAMILIES.get(type(layer))) is None:
            continue
        if not family.is_whole(layer):
            return f"the attention of {path} is not that of its class"
        if (why := _changed_part(layer, family.usual(layer))) is not None:
            return f"{path}.{why}"
    return None


def _changed_part(layer: nn.Module, usual: nn.Module) -> str | None:
    """What parts of a layer compute, or note, besides what their classes do, in words; None: nothing.

    Values of weights are nobody's matter.

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
        if hooks_of(part):
            return f"{name} has a hook"
        own = part.__dict__.get("forward")
        if own is not None or not _is_its_own(type(part)):
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
        if name in _NOT_READ or isinstance(value, Tensor):
            continue
        one, other = _comparable(vars(part).get(name)), _comparable(value)
        if one != other:
            return f".{name} is {one}, not {other}"
    for name in vars(part).keys() - vars(like).keys() - {"forward"}:
        if callable(getattr(type(part), name, None)):
            return f" has another {name} than that of its class"
    return None


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
        if not (getattr(hook, "__module__", None) or "").startswith(_NOTING)
    ]


_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def _comparable(value: Any) -> Hashable:
    """A value in comparable, printable form; for other objects their class."""
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((_comparable(key), _comparable(held)) for key, held in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_comparable(held)) for held in value))
    if isinstance(value, PretrainedConfig):
        return tuple((name, _comparable(one)) for name, one in sorted(vars(value).items()) if name[0] != "_")
    if isinstance(value, partial):
        return _comparable((value.func, value.args, value.keywords))
    return _name(value) if hasattr(value, "__qualname__") else _name(type(value))


def _name(what: Any) -> str:
    return f"{what.__module__}.{what.__qualname__}"
