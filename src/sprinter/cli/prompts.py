"""Reads what the user gives: the prompt, from standard input for ``-``, and files of text or JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sprinter.errors import UserError

__all__ = ["check_utf8", "read_json", "read_messages", "read_prompt", "read_text"]

_MOST_BYTES = 16 * 2**20  # an endless stream must not fill the memory


def read_prompt(prompt: str) -> str:
    """The prompt as text.

    One line break at the end of standard input is dropped: shells add it, and it would change what a model writes.

    Raises:
        UserError: the prompt is empty or not UTF-8, or standard input is closed or endless.
    """
    text = _from_stdin() if prompt == "-" else prompt
    check_utf8(text, "standard input" if prompt == "-" else "the prompt")
    if not text:
        raise UserError("the prompt is empty: give at least one word to continue")
    return text


def check_utf8(text: str, what: str) -> None:
    """Raise a UserError for text of bytes that are no UTF-8, which arrive as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise UserError(
            f"{what} is not valid UTF-8 (byte 0x{byte:02x}, after {error.start} characters): convert it to UTF-8"
        ) from None


def read_messages(file: Path) -> list[dict[str, Any]]:
    """The conversation in a JSON file: a list of messages, or an object with the list as "messages".

    Raises:
        UserError: the file cannot be read, is not JSON, or holds something else.
    """
    value = read_json(file, f"--messages '{file}'", "a JSON file of messages")
    value = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise UserError(
            f'--messages \'{file}\' holds no messages: give [{{"role": "user", "content": "..."}}, ...]'
        )
    return value


def read_text(file: Path, name: str, wanted: str) -> str:
    """The text of a file that the user gave.

    Args:
        name: the file in messages. wanted: what to give in its place.

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {name} ({error.strerror}): give {wanted}") from None
    except UnicodeDecodeError:
        raise UserError(f"{name} is not valid UTF-8: convert it to UTF-8, or give {wanted}") from None


def read_json(file: Path, name: str, wanted: str) -> Any:
    """The value in a JSON file that the user gave; arguments and errors as of ``read_text``."""
    text = read_text(file, name, wanted)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise UserError(f"{name} is not JSON ({error}): give {wanted}") from None


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
    return data.decode(errors="surrogateescape").removesuffix("\n").removesuffix("\r")
