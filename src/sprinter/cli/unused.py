"""Refuses options that have no effect in combination with others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sprinter.errors import UserError

__all__ = ["refuse_unused"]


def refuse_unused(command: Callable[..., Any], given: Mapping[str, Any], why: str) -> None:
    """Refuse options that were given although they have no effect.

    Args:
        command: the command, whose signature has the defaults.
        given: values of the options that have no effect here, by parameter name.
        why: end of the message: in which case they have no effect, and how to fix it.

    Raises:
        UserError: an option differs from its default; names the first.
    """
    parameters = inspect.signature(command).parameters
    for name, value in given.items():
        default = parameters[name].default
        if value != default and value != []:
            shown = f"MODEL {value[0]}" if name == "models" else f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{shown} has no effect {why}")
