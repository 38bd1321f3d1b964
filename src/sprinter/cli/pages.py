"""Shows a text while it is generated: coloured on a terminal, plain in a pipe; with ``--json`` only at the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.plots import check_plots

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sprinter.decode.draft import Token
    from sprinter.engine.generation import Generation

__all__ = [
    "JsonPage", "Page", "TerminalPage", "check_out", "console", "harmless", "legend", "painted", "print_files",
    "print_json", "print_table", "refuse_file", "write_file", "write_json",
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


class Page:
    """Shows texts, one after the other: plain on standard output, statistics on standard error.

    Args:
        file: takes the place of standard output.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file, self._shown = file, 0  # characters of the present text

    def begin(self, prompt: str) -> None:
        """Called before the first token; a plain page does not show the prompt."""

    def add(self, token: Token) -> None:
        """Show the next token."""
        self._shown += len(token.text)
        self._write(token.text, token.origin.value)

    def end(self, out: Generation) -> None:
        """Show the rest of the text and the statistics line."""
        self.finish(out)
        start = "stopped early: " if out.stopped else ""
        print(start + out.stats.summary, file=sys.stderr, flush=True)

    def finish(self, out: Generation) -> None:
        """Show the rest of the text and a line break."""
        self._write(out.text[self._shown :] + "\n", "")
        self._shown = 0

    def break_off(self) -> None:
        """End the line of a text that is not finished."""
        if self._shown:
            self._write("\n", "")
            self._shown = 0

    def _write(self, text: str, origin: str) -> None:
        file = self._file or sys.stdout
        file.write(text)
        file.flush()


class TerminalPage(Page):
    """Shows each token in the colour of its origin, below a legend and the end of the prompt."""

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self._console = Console(highlight=False)

    def begin(self, prompt: str) -> None:
        """Print the legend and the end of the prompt."""
        self._console.print(legend())
        self._write(prompt if len(prompt) <= _PROMPT_SHOWN else f"...{prompt[-_PROMPT_SHOWN:]}", "prompt")

    def _write(self, text: str, origin: str) -> None:
        self._console.print(painted([(text, origin)]), end="", soft_wrap=True)
        self._console.file.flush()


class JsonPage(Page):
    """Prints one JSON object on one line, after the last token."""

    def add(self, token: Token) -> None:
        """The object holds all tokens; ``end`` prints it."""

    def end(self, out: Generation) -> None:
        """Print the object."""
        print_json(out.to_dict())


def print_json(value: dict[str, Any]) -> None:
    """Print an object as one line of ASCII, which any terminal and pipe can carry."""
    print(json.dumps(value, allow_nan=False), flush=True)


def refuse_file(out: Path) -> None:
    """Raise a UserError for an --out that is to be a directory and is a file."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out '{out}' is a file: give a directory")


def check_out(out: Path | None, figures: bool) -> None:
    """Check, before any work, that files can be written to --out and figures be drawn."""
    if out is None:
        return
    refuse_file(out)
    if figures:
        check_plots("give --no-figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --out '{out}' ({error.strerror}): give another directory") from None


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write an object to a file in --out, atomically; returns its path."""
    return write_file(path, json.dumps(value, allow_nan=False) + "\n")


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file in --out, atomically; returns its path."""
    try:
        return write_atomic(path, content)
    except OSError as error:
        raise UserError(f"cannot write '{path}' ({error.strerror}): free it or give another --out") from None


def print_files(files: Sequence[Path], more: str = "") -> None:
    """Name the files that a command wrote, if there are any."""
    if files:
        console().print(f"wrote {', '.join(map(str, files))}{more}")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str | None = None, left: int = 1
) -> None:
    """Print a table, below its title.

    Args:
        left: number of first columns that hold text; the others hold numbers, flush right.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title and Text(title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(Text(name), justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    console().print(table)


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
