"""Lets commands share options: one parameter of a function becomes several options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

import typer

__all__ = ["Decorator", "in_place_of", "option", "parameter", "takes"]

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(about: str, *flags: str, default: str | bool = True, panel: str | None = None, **more: Any) -> Any:
    """An option of the command line: ``typer.Option`` with its help first.

    Args:
        flags: in place of the one that the parameter's name gives.
        default: what the help shows as the default; False: nothing.
        panel: group of options in the help.
        more: for ``typer.Option``.
    """
    return typer.Option(*flags, help=about, show_default=default, rich_help_panel=panel, **more)


def parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """A keyword parameter that typer reads as an option."""
    return inspect.Parameter(
        name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
    )


def takes(name: str, kind: type, without: Collection[str] = (), **defaults: Any) -> Decorator:
    """Decorator of a command: replaces its parameter of a dataclass by options, the fields of the class.

    Args:
        without: fields that the command does not offer.
        defaults: the command's own defaults.
    """
    hints = get_type_hints(kind, include_extras=True)
    shown = [
        parameter(one.name, hints[one.name], defaults.get(one.name, one.default))
        for one in fields(kind)
        if one.name not in without
    ]
    return in_place_of(name, shown, lambda given: kind(**given))


def in_place_of(
    name: str, shown: Sequence[inspect.Parameter], make: Callable[[dict[str, Any]], Any]
) -> Decorator:
    """Decorator of a command: replaces one parameter by several options.

    Args:
        name: the parameter of the decorated function.
        shown: the options that the command line shows instead.
        make: makes the parameter's value from the options' values by name.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            value = make({one.name: given.pop(one.name) for one in shown})
            return command(**given, **{name: value})

        own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [each for one in own for each in (shown if one.name == name else (one,))]
        run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate
