"""Command-line options of generation, derived from ``GenerationOptions``: names, types, defaults and help.

The tables below hold what typer needs besides.
"""

from __future__ import annotations

import json
from typing import Any

from sprinter.cli.options import complete_method
from sprinter.cli.prompts import check_utf8
from sprinter.cli.signature import Decorator, takes
from sprinter.engine.options import OPTIONS, GenerationOptions
from sprinter.errors import UserError

__all__ = ["AT_DEFAULTS", "generates"]

AT_DEFAULTS: Any = None
"""Default of a command's parameter ``options``, which ``generates`` replaces by options."""

_OFFERED = [name for name in OPTIONS if name not in ("switches", "copy_switches", "ahead", "rules")]
_MORE: dict[str, dict[str, Any]] = {
    "method": {"autocompletion": complete_method, "default": "exact: auto, or autoregressive without a draft"},
    "logit_bias": {"metavar": "ID=NUMBER", "kind": str},
    "logprobs": {"default": "none; with --json or --prompts"},
    "presence_penalty": {"default": "0"}, "frequency_penalty": {"default": "0"},
    "budget": {"default": "the method's own"},
    "never_slower": {"default": "without a method, and with auto"},
    "chat_template_kwargs": {"default": False, "metavar": "JSON"},
    "response_format": {"default": False, "metavar": "JSON"},
}  # fmt: skip
_OBJECTS = {
    "chat_template_kwargs": '{"enable_thinking": false}',
    "response_format": '{"type": "json_object"}',
}
_SAMPLING = (
    "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty logit_bias bad_words "
    "seed"
)


def generates(*only: str, **defaults: Any) -> Decorator:
    """Decorator of a command: its parameter ``options: GenerationOptions`` becomes the options of generation.

    They are checked before the command begins, and so before any model is loaded.

    Args:
        only: names of the options that the command offers; none: all.
        defaults: the command's own defaults, by name.
    """
    panels = {"Generation": " ".join(OPTIONS), "Sampling": _SAMPLING}
    return takes(
        "options", GenerationOptions, stated=OPTIONS, only=only or _OFFERED, panels=panels, more=_MORE, read=_options,
        **defaults,
    )  # fmt: skip


def _options(given: dict[str, Any]) -> dict[str, Any]:
    for what, words in (("a stop string", given.get("stop")), ("a bad word", given.get("bad_words"))):
        for word in words or ():
            check_utf8(word, what)
    if given.get("logit_bias"):
        given["logit_bias"] = [_bias(one) for one in given["logit_bias"]]
    for name, example in _OBJECTS.items():
        if given.get(name) is not None:
            given[name] = _object(name, given[name], example)
    return given


def _bias(given: str) -> tuple[int, float]:
    """(token id, number) of an option such as 15=-100."""
    id, _, number = given.partition("=")
    try:
        return int(id), float(number)
    except ValueError:
        raise UserError(
            f"--logit-bias {given} is not ID=NUMBER: give a token id and a number, 15=-100"
        ) from None


def _object(name: str, given: str, example: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(f"--{name.replace('_', '-')} {given} is not a JSON object: give one, '{example}'")
    return found
