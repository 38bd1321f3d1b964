"""Reads the prompt from the argument, from standard input for ``-``, or messages from a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sprinter.errors import UserError

__all__ = ["read_messages", "read_prompt"]

_MOST_BYTES = 16 * 2**20  # an endless stream must not fill the memory


def read_prompt(prompt: str) -> str:
    """The prompt as text.

    One line break at the end of standard input is dropped: shells add it, and it would change what a model writes.

    Raises:
        UserError: the prompt is empty or not UTF-8, or standard input is closed or endless.
    """
    text = _from_stdin() if prompt == "-" else prompt
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of an argument that are not UTF-8 arrive as surrogates
        raise UserError(
            f"the prompt is not valid UTF-8 (byte 0x{ord(text[error.start]) & 0xFF:02x}, "
            f"after {error.start} characters): convert it to UTF-8"
        ) from None
    if not text:
        raise UserError("the prompt is empty: give at least one word to continue")
    return text


def read_messages(file: Path) -> list[dict[str, Any]]:
    """The conversation in a JSON file: a list of messages, or an object with the list as "messages".

    Raises:
        UserError: the file cannot be read, is not JSON, or holds something else.
    """
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read --messages '{file}' ({error.strerror}): check the path") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UserError(f"--messages '{file}' is not JSON ({error}): fix it") from None
    value = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise UserError(
            f'--messages \'{file}\' holds no messages: give [{{"role": "user", "content": "..."}}, ...]'
        )
    return value


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed: give the prompt as an argument, or pipe it into '-'")
    try:
        data = sys.stdin.buffer.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read standard input ({error.strerror}): pipe the prompt into '-'") from None
    if len(data) > _MOST_BYTES:
        raise UserError(
            f"standard input holds more than {_MOST_BYTES // 2**20} MiB, too much for a prompt: give a shorter one"
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not valid UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}): "
            "convert it to UTF-8"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")
