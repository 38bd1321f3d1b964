"""Command-line options of generation, derived from ``GenerationOptions``: names, defaults, help, choices.

A field with a ``help`` is an option; the tables below hold what typer needs besides its default and help.
"""

from __future__ import annotations

import json
import re
from dataclasses import Field, fields
from typing import Annotated, Any, Literal, cast

from sprinter.cli.loading import Loading
from sprinter.cli.options import complete_method
from sprinter.cli.prompts import check_utf8
from sprinter.cli.signature import Decorator, in_place_of, option, parameter
from sprinter.engine.options import GenerationKeywords, GenerationOptions
from sprinter.errors import UserError

__all__ = ["AT_DEFAULTS", "checked_options", "generates", "in_options"]

AT_DEFAULTS = GenerationKeywords()
"""Default of a command's parameter ``options``, which ``generates`` replaces by options."""

_OFFERED = [one for one in fields(GenerationOptions) if one.metadata["help"] is not None]
_MORE: dict[str, dict[str, Any]] = {
    "method": {
        "kind": str | None, "flags": ("--method", "-m"), "autocompletion": complete_method,
        "default": "exact: auto, or autoregressive without a draft",
    },
    "max_new_tokens": {"flags": ("--max-new-tokens", "-n")},
    "temperature": {"flags": ("--temperature", "-t")},
    "stop": {"kind": list[str] | None, "default": False},
    "stop_token_ids": {"kind": list[int] | None, "flags": ("--stop-token-id",), "default": False},
    "logit_bias": {"kind": list[str] | None, "default": False, "metavar": "ID=NUMBER"},
    "bad_words": {"kind": list[str] | None, "flags": ("--bad-word",), "default": False},
    "logprobs": {"kind": int | None},
    "require_lossless": {"flags": ("--require-lossless",)},
    "budget": {"kind": float | None, "default": "what the method says"},
    "never_slower": {"kind": bool | None, "default": "without a method, and with auto"},
    "chat_template_kwargs": {"kind": str | None, "default": False, "metavar": "JSON"},
}  # fmt: skip
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "seed",
)  # fmt: skip


def generates(*only: str, **defaults: Any) -> Decorator:
    """Decorator of a command: its parameter ``options: GenerationKeywords`` becomes the options of generation.

    Args:
        only: names of the options that the command offers; none: all.
        defaults: the command's own defaults, by name.
    """
    offered = [one for one in _OFFERED if not only or one.name in only]
    lists = {one.name for one in offered if isinstance(one.default, tuple)}

    def keywords(given: dict[str, Any]) -> GenerationKeywords:
        values = {name: tuple(value or ()) if name in lists else value for name, value in given.items()}
        if values.get("logit_bias"):
            values["logit_bias"] = tuple(_bias(one) for one in values["logit_bias"])
        if values.get("chat_template_kwargs") is not None:
            values["chat_template_kwargs"] = _template_arguments(str(values["chat_template_kwargs"]))
        return cast(GenerationKeywords, values)

    shown = [
        parameter(
            one.name, _annotation(one), None if one.name in lists else defaults.get(one.name, one.default)
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
            f"--logit-bias {given} is not ID=NUMBER: give a token id and a number, 15=-100"
        ) from None


def _template_arguments(given: str) -> dict[str, Any]:
    try:
        found = json.loads(given)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"--chat-template-kwargs {given} is not a JSON object: give one, '{{\"enable_thinking\": false}}'"
        )
    return found


def _annotation(one: Field[Any]) -> Any:
    """The annotation of an option for typer: type, flags and help."""
    more = dict(_MORE.get(one.name, {}))
    kind, flags = more.pop("kind", type(one.default)), more.pop("flags", ())
    if choices := one.metadata["choices"]:
        kind = Literal[choices]
    panel = "Sampling" if one.name in _SAMPLING else "Generation"
    return Annotated[kind, option(one.metadata["help"], *flags, panel=panel, **more)]


# --- messages of the library ------------------------------------------------------------------------------------------
_SWITCHES = {
    "across=True": "--across", "compile=True": "--compile", "compile=False": "--no-compile",
    "trust_remote_code=True": "--trust-remote-code", "require_lossless=True": "--require-lossless",
    "allow_anonymous=True": "--allow-anonymous",
}  # fmt: skip
_OTHERS = (
    "prompt_share", "prompt_tokens", "classes_per_prompt", "batch_size", "limit", "field", "split",
    "engine", "workers", "ray_address", "width", "layers", "mix", "repeats", "warmup", "judge_price", "host",
    "port", "api_keys", "vocabulary", "held_out", "on_policy", "warm_up",
)  # fmt: skip
"""Options of single commands that appear in messages of the library."""
_FLAGS = (
    {name: f"--{name.replace('_', '-')}" for name in (*(one.name for one in fields(Loading)), *_OTHERS)}
    | {"new_tokens": "--max-new-tokens"}
    | {
        one.name: _MORE.get(one.name, {}).get("flags", (f"--{one.name.replace('_', '-')}",))[0]
        for one in _OFFERED
    }
)
_KEYWORD = re.compile(rf"(?<![\w(.=-])({'|'.join(_FLAGS)})=(?=\S)")


def in_options(message: str) -> str:
    """Replace Python keywords in a message by command-line options: top_p=0 -> --top-p 0."""
    for keyword, switch in _SWITCHES.items():
        message = message.replace(keyword, switch)
    return _KEYWORD.sub(lambda match: f"{_FLAGS[match[1]]} ", message)
