"""Translates messages of the library: Python keywords become command-line options."""

from __future__ import annotations

import re
from dataclasses import fields

from sprinter.cli.generating import FLAGS
from sprinter.cli.loading import Loading

__all__ = ["in_options"]

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
    | FLAGS
)
_KEYWORD = re.compile(rf"(?<![\w(.=-])({'|'.join(_FLAGS)})=(?=\S)")


def in_options(message: str) -> str:
    """Replace Python keywords in a message by command-line options: top_p=0 -> --top-p 0."""
    for keyword, switch in _SWITCHES.items():
        message = message.replace(keyword, switch)
    return _KEYWORD.sub(lambda match: f"{_FLAGS[match[1]]} ", message)
