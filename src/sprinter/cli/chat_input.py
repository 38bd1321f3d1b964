"""Lines of a chat: typed at a terminal, with editing, history and completion, or read from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from sprinter.cli.chat_commands import COMMANDS
from sprinter.cli.completion import complete_method
from sprinter.errors import UserError

__all__ = ["Keyboard", "PipedLines", "complete_entry", "history_file"]

_MOST_BYTES = 16 * 2**20  # an endless line must not fill the memory
_KEPT = 1000  # lines of the history on disk


class PipedLines:
    """Lines of standard input, which must be UTF-8."""

    interactive = False

    def __init__(self) -> None:
        if sys.stdin is None or sys.stdin.closed:
            raise UserError("standard input is closed: type or pipe messages, one on a line")
        self._number, self._over = 0, False

    def read(self, prompt: str) -> str:
        """The next line; the prompt is not shown."""
        data = b"" if self._over else sys.stdin.buffer.readline(_MOST_BYTES + 1)
        self._number += 1
        if not data:
            raise EOFError
        if len(data) > _MOST_BYTES:
            self._over = True
            raise UserError(
                f"line {self._number} of standard input exceeds {_MOST_BYTES // 2**20} MiB: shorten it"
            )
        try:
            return data.decode().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"line {self._number} of standard input is not valid UTF-8 (byte 0x{data[error.start]:02x}): "
                "convert it to UTF-8"
            ) from None


class Keyboard:
    """Lines typed at a terminal, edited with readline. A context: the history is written at the end.

    Args:
        warn: prints a line: readline is missing, or the history cannot be kept.
    """

    interactive = True

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn, self._history = warn, history_file()
        self._readline = _readline()
        if self._readline is None:
            warn(
                "this Python has no readline module: lines have no history and no editing but the terminal's own"
            )

    def __enter__(self) -> Keyboard:
        if self._readline is not None:
            _bind(self._readline)
            if self._history is not None and self._history.exists():
                self._keep("read", self._readline.read_history_file)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._readline is not None and self._history is not None:
            self._readline.set_history_length(_KEPT)
            self._keep("write", self._write)

    def read(self, prompt: str) -> str:
        """The next line, below the prompt."""
        if sys.stdout.isatty():
            return input(prompt)
        sys.stderr.write(prompt)  # standard output is for the answers
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _keep(self, what: str, act: Callable[[str], None]) -> None:
        try:
            act(str(self._history))
        except OSError as error:
            self._warn(
                f"cannot {what} the input history '{self._history}' ({error.strerror}): set SPRINTER_HISTORY to "
                "another file, or to nothing for none"
            )

    def _write(self, file: str) -> None:
        assert self._readline is not None
        Path(file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))  # nobody else reads what was typed
        self._readline.write_history_file(file)


def history_file() -> Path | None:
    """File of the input history: ``SPRINTER_HISTORY`` (empty: none), else in the user's state directory."""
    if (own := os.environ.get("SPRINTER_HISTORY")) is not None:
        return Path(own).expanduser() if own else None
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "sprinter" / "chat_history"


def complete_entry(line: str, word: str) -> list[str]:
    """What could replace the last word of a line: commands, after /method its names, after /set the options."""
    from sprinter.engine.options import GenerationKeywords

    before = line[: len(line) - len(word)].split()
    if not before:
        return [f"/{name} " for name in COMMANDS if word and f"/{name}".startswith(word)]
    if before == ["/method"]:
        return complete_method(word)
    if before == ["/set"]:
        return [
            f"{name} "
            for name in GenerationKeywords.__annotations__
            if name.startswith(word) and name != "sampling"
        ]
    return []


def _readline() -> ModuleType | None:
    """The readline module, which Python lacks on Windows and in some builds."""
    try:
        import readline
    except ImportError:
        return None
    return readline


def _bind(readline: ModuleType) -> None:
    """Bind Tab to completion, and with GNU readline Alt-Enter to a line break."""

    def complete(word: str, state: int) -> str | None:
        found = complete_entry(readline.get_line_buffer()[: readline.get_endidx()], word)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \n")
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
        return
    readline.parse_and_bind("tab: complete")
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')
