"""Options that a command takes and that have no effect beside others: refused, never ignored."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sprinter.errors import UserError

__all__ = ["refuse_unused"]


def refuse_unused(command: Callable[..., Any], given: Mapping[str, Any], why: str) -> None:
    """Refuse options that are not at their defaults.

    Args:
        command: whose parameters they are; it has the defaults.
        given: the values of those that have no effect here, by parameter.
        why: when that is so, and what to do: the end of the line.

    Raises:
        UserError: one differs from its default; names the first.
    """
    parameters = inspect.signature(command).parameters
    for name, value in given.items():
        default = parameters[name].default
        if value != default and value != []:
            shown = f"MODEL {value[0]}" if name == "models" else f"--{name.replace('_', '-')} {value}"
            raise UserError(f"{shown} has no effect {why}")
