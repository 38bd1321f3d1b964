"""How a text appears while it is generated: coloured on a terminal, plain in a pipe, not at all under ``--json``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from sprinter.decode.draft import Stats, Token
    from sprinter.engine.generation import Generation

__all__ = [
    "Holdback", "JsonPage", "Page", "PlainPage", "TerminalPage", "console", "legend", "painted", "print_json",
    "statistics_line",
]  # fmt: skip

# Okabe and Ito's colours, told apart by all common kinds of colour vision; the attribute tells them apart without any.
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
        """Before the first token."""

    def add(self, token: Token) -> None:
        """One token more."""

    def end(self, out: Generation) -> None:
        """After the last one."""


class Holdback:
    """Keeps back text that may be the begin of a stop string, so that a stop string never shows.

    Args:
        stop: the stop strings of the request.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self.given = 0  # characters given out

    def push(self, text: str, origin: str) -> list[Piece]:
        """What may be shown now."""
        self._held.append((text, origin))
        whole = "".join(held for held, _ in self._held)
        found = [whole.find(word) for word in self._stop if word in whole]
        return list(self._take(min(found) if found else len(whole) - self._unsure(whole)))

    def rest(self, whole: str) -> list[Piece]:
        """At the end: what is still missing of the whole text."""
        pieces = list(self._take(len(whole) - self.given))
        if missing := whole[self.given :]:
            self.given = len(whole)
            pieces.append((missing, ""))
        return pieces

    def _unsure(self, whole: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = min(len(whole), max((len(word) for word in self._stop), default=1) - 1)
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if any(word.startswith(whole[-n:]) for word in self._stop)), 0)

    def _take(self, count: int) -> Iterator[Piece]:
        while self._held and count > 0:
            text, origin = self._held.pop(0)
            if len(text) > count:
                self._held.insert(0, (text[count:], origin))
            self.given += min(count, len(text))
            yield text[:count], origin
            count -= len(text)


class TerminalPage:
    """Colours each token by its origin, under a legend.

    Args:
        stop: the stop strings of the request.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._holdback = Holdback(stop)

    def begin(self, prompt: str) -> None:
        """The legend, then the end of the prompt."""
        shown = prompt if len(prompt) <= _PROMPT_SHOWN else f"...{prompt[-_PROMPT_SHOWN:]}"
        self._console.print(legend())
        self._print([(shown, "prompt")])

    def add(self, token: Token) -> None:
        """The token in its colour."""
        self._print(self._holdback.push(token.text, token.origin.value))

    def end(self, out: Generation) -> None:
        """The rest, and the statistics line."""
        self._print([*self._holdback.rest(out.text), ("\n", "")])
        _print_statistics(out)

    def _print(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            self._console.print(painted(pieces), end="", soft_wrap=True)
            self._console.file.flush()


class PlainPage:
    """The text alone on standard output, the statistics line on standard error.

    Args:
        stop: the stop strings of the request.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._holdback = Holdback(stop)

    def begin(self, prompt: str) -> None:
        """Nothing."""

    def add(self, token: Token) -> None:
        """The token's text, at once."""
        self._write(self._holdback.push(token.text, token.origin.value))

    def end(self, out: Generation) -> None:
        """The rest and a line break."""
        self._write([*self._holdback.rest(out.text), ("\n", "")])
        _print_statistics(out)

    def _write(self, pieces: Sequence[Piece]) -> None:
        if pieces:
            sys.stdout.write("".join(text for text, _ in pieces))
            sys.stdout.flush()


class JsonPage:
    """One JSON object on one line, when everything is done."""

    def begin(self, prompt: str) -> None:
        """Nothing."""

    def add(self, token: Token) -> None:
        """Nothing."""

    def end(self, out: Generation) -> None:
        """The object."""
        print_json(out.to_dict())


def print_json(value: dict[str, Any]) -> None:
    """One line, ASCII only, so that it passes through any terminal and pipe."""
    print(json.dumps(value, allow_nan=False), flush=True)


def legend() -> Text:
    """One line with each origin in its own style."""
    from rich.text import Text

    words = [Text(_MEANINGS.get(origin, origin), style) for origin, style in _STYLES.items()]
    return Text("tokens: ").append_text(Text(", ").join(words))


def painted(pieces: Sequence[Piece]) -> Text:
    """The pieces, each in the style of its origin; the prompt in italics."""
    from rich.text import Text

    text = Text()
    for piece, origin in pieces:
        text.append(_harmless(piece), "italic" if origin == "prompt" else _STYLES.get(origin, ""))
    return text


def _harmless(text: str) -> str:
    """Without control characters: a model must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _print_statistics(out: Generation) -> None:
    start = "stopped early: " if out.finish_reason == "cancelled" else ""
    print(start + statistics_line(out.stats), file=sys.stderr, flush=True)


def statistics_line(stats: Stats) -> str:
    """Speed, target calls and drift in one line."""
    plural = "" if stats.new_tokens == 1 else "s"
    calls = stats.target_calls / stats.new_tokens if stats.new_tokens else 0.0
    drift = "drift not measured"
    if stats.mean_drift is not None:
        drift = f"drift {stats.mean_drift:.3f} (coverage {stats.drift_coverage:.0%})"
    label = "lossless" if stats.lossless else "lossy"
    count = f"{stats.new_tokens} token{plural}, {stats.tokens_per_s:.1f}/s"
    return f"{count}, {calls:.2f} target calls/token, {drift}, {label}"


def console() -> Console:
    """For tables: as wide as the terminal, wide enough not to fold in a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 200)
