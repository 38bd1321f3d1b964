"""Modules anew over the same weights, so that a change of some parts leaves a model as it is."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from sprinter.errors import UserError

__all__ = ["twin"]

_Module = TypeVar("_Module", bound=nn.Module)


def twin(module: _Module, *, same_hooks: bool = False) -> _Module:
    """A module of the same parts, all new, over the same tensors; other threads may run the first meanwhile.

    Args:
        same_hooks: both call the same hooks, also those that are registered later.

    Raises:
        UserError: a part has a forward of its own, put there by another library.
    """
    return _twin(module, {}, same_hooks)


def _twin(module: _Module, made: dict[nn.Module, nn.Module], same_hooks: bool) -> _Module:
    """A module of the same parts, all new, over the same tensors; other threads may run the first meanwhile.

    Args:
        made: twins by module, so that a part in two places stays one.
    """
    if (known := made.get(module)) is not None:
        return known  # type: ignore[return-value]
    twin = made[module] = type(module).__new__(type(module))
    own = module.__dict__.copy()
    if type(own.get("forward")).__module__.startswith("sprinter"):
        del own["forward"]  # a pass that is being captured has put it there
    if "forward" in own:
        raise UserError(
            f"a {type(module).__name__} of the model has another forward: merge an adapter into the weights instead"
        )
    for name, value in own.items():
        if isinstance(value, nn.Module):
            value = _twin(value, made, same_hooks)
        elif isinstance(value, dict) and not (same_hooks and "hooks" in name):
            value = value.copy()
            if name in ("_forward_hooks", "_forward_pre_hooks"):  # those of a pass that runs now
                value = type(value)((id, one) for id, one in value.items() if not _notes(one))
            elif name == "_modules":
                value = {
                    part: None if one is None else _twin(one, made, same_hooks) for part, one in value.items()
                }
        twin.__dict__[name] = value
    return twin


def _notes(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("sprinter.")
