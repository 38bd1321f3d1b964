"""Command-line options of generation, derived from ``GenerationOptions``: names, defaults, help, choices.

A field with a ``help`` is an option; the tables below hold what typer needs besides its default and help.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, cast

import typer

from sprinter.cli.completion import complete_method
from sprinter.cli.prompts import check_utf8
from sprinter.cli.signature import Result, in_place_of, option
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.errors import UserError

__all__ = ["AT_DEFAULTS", "FLAGS", "checked_options", "generates"]

AT_DEFAULTS = GenerationKeywords()
"""Default of a command's parameter ``options``, which ``generates`` replaces by options."""

_OFFERED = [one for one in fields(GenerationOptions) if one.metadata["help"] is not None]
_FLAGS = {
    "method": ("--method", "-m"),
    "max_new_tokens": ("--max-new-tokens", "-n"),
    "temperature": ("--temperature", "-t"),
    "stop_token_ids": ("--stop-token-id",),
    "bad_words": ("--bad-word",),
    "require_lossless": ("--require-lossless",),
}
_TYPES: dict[str, Any] = {
    "method": str | None,
    "stop": list[str] | None,
    "stop_token_ids": list[int] | None,
    "logit_bias": list[str] | None,
    "bad_words": list[str] | None,
    "logprobs": int | None,
    "budget": float | None,
    "never_slower": bool | None,
    "chat_template_kwargs": str | None,
}
_SHOWN: dict[str, dict[str, Any]] = {
    "method": {
        "show_default": "exact: auto, or autoregressive without a draft",
        "autocompletion": complete_method,
    },
    "budget": {"show_default": "what the method says"},
    "never_slower": {"show_default": "without a method, and with auto"},
    "stop": {"show_default": False},
    "stop_token_ids": {"show_default": False},
    "logit_bias": {"show_default": False, "metavar": "ID=NUMBER"},
    "bad_words": {"show_default": False},
    "chat_template_kwargs": {"show_default": False, "metavar": "JSON"},
}

FLAGS = {one.name: _FLAGS.get(one.name, (f"--{one.name.replace('_', '-')}",))[0] for one in _OFFERED}
"""Keyword of ``GenerationOptions`` -> flag of the command line."""


def generates(
    *, only: Collection[str] | None = None, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Decorator of a command: its parameter ``options: GenerationKeywords`` becomes the options of generation.

    Args:
        only: names of the options that the command offers; None: all.
        defaults: the command's own defaults, by name.
    """
    offered = [one for one in _OFFERED if only is None or one.name in only]
    lists = {one.name for one in offered if isinstance(one.default, tuple)}

    def keywords(given: dict[str, Any]) -> GenerationKeywords:
        values = {name: tuple(value or ()) if name in lists else value for name, value in given.items()}
        if values.get("logit_bias"):
            values["logit_bias"] = tuple(_bias(one) for one in values["logit_bias"])
        if values.get("chat_template_kwargs") is not None:
            values["chat_template_kwargs"] = _template_arguments(str(values["chat_template_kwargs"]))
        return cast(GenerationKeywords, values)

    shown = [
        option(
            one.name,
            _annotation(one),
            None if one.name in lists else defaults.get(one.name, one.default),
        )
        for one in offered
    ]
    return in_place_of("options", shown, keywords)


def checked_options(options: GenerationKeywords) -> GenerationOptions:
    """The options of a command, checked before any model is loaded.

    Raises:
        UserError: an invalid value; a stop string or a bad word that is empty or not UTF-8.
    """
    for what, flag, words in (
        ("a stop string", "--stop", options["stop"]), ("a bad word", "--bad-word", options["bad_words"]),
    ):  # fmt: skip
        for word in words or ():
            if not word:
                raise UserError(f"{what} is empty: give {flag} some text, or leave it out")
            check_utf8(str(word), what)
    return GenerationOptions(**options)


def _bias(given: str) -> tuple[int, float]:
    """(token id, number) of an option such as 15=-100."""
    id, _, number = given.partition("=")
    try:
        return int(id), float(number)
    except ValueError:
        raise UserError(
            f"--logit-bias {given} is no ID=NUMBER: give a token id and a number, 15=-100"
        ) from None


def _template_arguments(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"--chat-template-kwargs {given} is no JSON object: give one, '{{\"enable_thinking\": false}}'"
        )
    return found


def _annotation(one: Field[Any]) -> Any:
    """The annotation of an option for typer: type, flags and help."""
    kind, choices = _TYPES.get(one.name, type(one.default)), one.metadata["choices"]
    if choices:
        kind = Literal[choices]
    flags, shown = _FLAGS.get(one.name, ()), _SHOWN.get(one.name, {})
    return Annotated[kind, typer.Option(*flags, help=one.metadata["help"], **shown)]
