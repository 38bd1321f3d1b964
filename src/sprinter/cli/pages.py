"""Shows a text while it is generated: coloured on a terminal, plain in a pipe; with ``--json`` only at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sprinter.decode.draft import Stats, Token
    from sprinter.engine.generation import Generation

__all__ = [
    "JsonPage", "Page", "PlainPage", "TerminalPage", "console", "harmless", "legend", "painted", "print_json",
    "statistics_line",
]  # fmt: skip

# Okabe and Ito's colours, distinct for all common kinds of colour vision; the attributes are distinct without colours.
_STYLES = {
    "trusted": "underline #e69f00",
    "accepted": "dim #56b4e9",
    "replacement": "reverse #d55e00",
    "bonus": "bold #009e73",
    "target": "",
}
_MEANINGS = {"trusted": "trusted (unchecked)"}
_PROMPT_SHOWN = 400  # characters of the prompt repeated on a terminal

Piece = tuple[str, str]
"""Text and the origin of its token ("" if unknown)."""


class Page(Protocol):
    """Shows one text."""

    def begin(self, prompt: str) -> None:
        """Called before the first token."""

    def add(self, token: Token) -> None:
        """Called with each token."""

    def end(self, out: Generation) -> None:
        """Called after the last token."""


class TerminalPage:
    """Shows each token in the colour of its origin, below a legend."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._shown = 0  # characters of the text

    def begin(self, prompt: str) -> None:
        """Print the legend and the end of the prompt."""
        shown = prompt if len(prompt) <= _PROMPT_SHOWN else f"...{prompt[-_PROMPT_SHOWN:]}"
        self._console.print(legend())
        self._print([(shown, "prompt")])

    def add(self, token: Token) -> None:
        """Print the token in its colour."""
        self._shown += len(token.text)
        self._print([(token.text, token.origin.value)])

    def end(self, out: Generation) -> None:
        """Print the rest of the text and the statistics line."""
        self.finish(out)
        _print_statistics(out)

    def finish(self, out: Generation) -> None:
        """Print the rest of the text and a line break."""
        self._print([(out.text[self._shown :], ""), ("\n", "")])

    def line_break(self) -> None:
        """End the line."""
        self._print([("\n", "")])

    def _print(self, pieces: Sequence[Piece]) -> None:
        self._console.print(painted(pieces), end="", soft_wrap=True)
        self._console.file.flush()


class PlainPage:
    """The text alone on standard output, the statistics line on standard error.

    Args:
        file: takes the place of standard output.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file, self._shown = file, 0  # characters of the text

    def begin(self, prompt: str) -> None:
        """The prompt is not printed."""

    def add(self, token: Token) -> None:
        """Print the token's text and flush."""
        self._shown += len(token.text)
        self._write(token.text)

    def end(self, out: Generation) -> None:
        """Print the rest of the text, a line break and the statistics line."""
        self.finish(out)
        _print_statistics(out)

    def finish(self, out: Generation) -> None:
        """Print the rest of the text and a line break."""
        self._write(out.text[self._shown :] + "\n")

    def line_break(self) -> None:
        """End the line."""
        self._write("\n")

    def _write(self, text: str) -> None:
        file = sys.stdout if self._file is None else self._file
        file.write(text)
        file.flush()


class JsonPage:
    """Prints one JSON object on one line, after the last token."""

    def begin(self, prompt: str) -> None:
        """The object holds the prompt; ``end`` prints it."""

    def add(self, token: Token) -> None:
        """The object holds all tokens; ``end`` prints it."""

    def end(self, out: Generation) -> None:
        """Print the object."""
        print_json(out.to_dict())


def print_json(value: dict[str, Any]) -> None:
    """Print an object as one line of ASCII, which any terminal and pipe can carry."""
    print(json.dumps(value, allow_nan=False), flush=True)


def legend() -> Text:
    """A legend: one line with each origin in its own style."""
    from rich.text import Text

    words = [Text(_MEANINGS.get(origin, origin), style) for origin, style in _STYLES.items()]
    return Text("tokens: ").append_text(Text(", ").join(words))


def painted(pieces: Sequence[Piece]) -> Text:
    """Text pieces, each in the style of its origin; the prompt in italics."""
    from rich.text import Text

    text = Text()
    for piece, origin in pieces:
        text.append(harmless(piece), "italic" if origin == "prompt" else _STYLES.get(origin, ""))
    return text


def harmless(text: str) -> str:
    """Text without control characters, so that a model cannot control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _print_statistics(out: Generation) -> None:
    start = "stopped early: " if out.finish_reason == "cancelled" else ""
    print(start + statistics_line(out.stats), file=sys.stderr, flush=True)


def statistics_line(stats: Stats) -> str:
    """One line with speed, target calls and drift."""
    return stats.summary


def console() -> Console:
    """The console for tables: as wide as the terminal; in a pipe wide enough not to wrap, without spaces at ends."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=240, file=cast(TextIO, _Trimmed()))


class _Trimmed:
    """Standard output without the spaces with which tables fill their lines."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)
