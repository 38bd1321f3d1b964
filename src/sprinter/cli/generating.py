"""Command-line options of generation, derived from ``GenerationOptions``: names, types, defaults and help.

The tables below hold what typer needs besides.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Annotated, Any, Literal, get_origin

from pydantic.fields import FieldInfo

from sprinter.cli.loading import Loading
from sprinter.cli.options import complete_method
from sprinter.cli.prompts import check_utf8
from sprinter.cli.signature import Decorator, in_place_of, option, parameter
from sprinter.engine.options import OPTIONS, GenerationOptions
from sprinter.errors import UserError
from sprinter.parameters import types_in

__all__ = ["AT_DEFAULTS", "generates", "in_options"]

AT_DEFAULTS: Any = None
"""Default of a command's parameter ``options``, which ``generates`` replaces by options."""

_OFFERED = [name for name in OPTIONS if name not in ("switches", "copy_switches", "ahead", "rules")]
_FLAGGED = {
    "method": ("--method", "-m"), "max_new_tokens": ("--max-new-tokens", "-n"), "temperature": ("--temperature", "-t"),
    "stop_token_ids": ("--stop-token-id",), "bad_words": ("--bad-word",), "require_lossless": ("--require-lossless",),
}  # fmt: skip
_MORE: dict[str, dict[str, Any]] = {
    "method": {"autocompletion": complete_method, "default": "exact: auto, or autoregressive without a draft"},
    "logit_bias": {"metavar": "ID=NUMBER"},
    "logprobs": {"default": "none; with --json or --prompts"},
    "presence_penalty": {"default": "0; -2 to 2"}, "frequency_penalty": {"default": "0; -2 to 2"},
    "budget": {"default": "what the method says"},
    "never_slower": {"default": "without a method, and with auto"},
    "chat_template_kwargs": {"default": False, "metavar": "JSON"},
}  # fmt: skip
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "bad_words", "seed",
)  # fmt: skip


def generates(*only: str, **defaults: Any) -> Decorator:
    """Decorator of a command: its parameter ``options: GenerationOptions`` becomes the options of generation.

    They are checked before the command begins, and so before any model is loaded.

    Args:
        only: names of the options that the command offers; none: all.
        defaults: the command's own defaults, by name.
    """
    usual = {
        name: None if OPTIONS[name].default == () else OPTIONS[name].default for name in only or _OFFERED
    } | defaults
    shown = [parameter(name, _annotation(name, OPTIONS[name]), default) for name, default in usual.items()]
    return in_place_of("options", shown, _options)


def _options(given: dict[str, Any]) -> GenerationOptions:
    for what, words in (("a stop string", given.get("stop")), ("a bad word", given.get("bad_words"))):
        for word in words or ():
            check_utf8(word, what)
    if given.get("logit_bias"):
        given["logit_bias"] = [_bias(one) for one in given["logit_bias"]]
    if given.get("chat_template_kwargs") is not None:
        given["chat_template_kwargs"] = _template_arguments(given["chat_template_kwargs"])
    return GenerationOptions(**given)


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


def _annotation(name: str, field: FieldInfo) -> Any:
    """The annotation of an option for typer: type, flags and help."""
    kind: Any = field.annotation
    about, more = (field.description or "").partition(". ")[0].rstrip(".") + ".", dict(_MORE.get(name, {}))
    if get_origin(kind) is not Literal:
        kind = next(
            (one for one in (str, bool, int, float) if one in types_in(kind) and name != "logit_bias"), str
        )
        if isinstance(field.default, tuple):
            kind, about = list[kind], f"{about[:-1]}; may be repeated."
            more["default"] = False
        kind = kind | None if field.default in (None, ()) else kind
    panel = "Sampling" if name in _SAMPLING else "Generation"
    return Annotated[kind, option(about, *_FLAGGED.get(name, ()), panel=panel, **more)]


# --- messages of the library ------------------------------------------------------------------------------------------
_SWITCHES = {
    "across=True": "--across", "compile=True": "--compile", "compile=False": "--no-compile",
    "trust_remote_code=True": "--trust-remote-code", "require_lossless=True": "--require-lossless",
    "allow_anonymous=True": "--allow-anonymous",
}  # fmt: skip
_OTHERS = (
    "prompt_share", "prompt_tokens", "classes_per_prompt", "batch_size", "limit", "field", "split",
    "engine", "workers", "ray_address", "width", "layers", "mix", "repeats", "warmup", "judge_price", "host",
    "port", "api_keys", "tls_cert", "tls_key", "vocabulary", "held_out", "on_policy", "warm_up",
)  # fmt: skip
"""Options of single commands that appear in messages of the library."""
_FLAGS = (
    {name: f"--{name.replace('_', '-')}" for name in (*(one.name for one in fields(Loading)), *_OTHERS)}
    | {"new_tokens": "--max-new-tokens"}
    | {f"{what}_timeout_s": f"--{what}-timeout" for what in ("queue", "request", "drain")}
    | {name: _FLAGGED.get(name, (f"--{name.replace('_', '-')}",))[0] for name in _OFFERED}
)
_KEYWORD = re.compile(rf"(?<![\w(.=-])({'|'.join(_FLAGS)})=(?=\S)")


def in_options(message: str) -> str:
    """Replace Python keywords in a message by command-line options: top_p=0 -> --top-p 0."""
    for keyword, switch in _SWITCHES.items():
        message = message.replace(keyword, switch)
    return _KEYWORD.sub(lambda match: f"{_FLAGS[match[1]]} ", message)
