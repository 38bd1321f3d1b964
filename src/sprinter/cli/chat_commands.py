"""What is typed in a chat, messages and commands, and what the chat shows for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.cli.pages import Page, TerminalPage, harmless, legend
from sprinter.cli.prompts import read_json
from sprinter.engine.options import check_name
from sprinter.errors import SprinterError, UserError, first_line
from sprinter.files import write_atomic

if TYPE_CHECKING:
    from sprinter.cli.chat_session import Session
    from sprinter.decode.draft import Token
    from sprinter.engine.generation import Generation

__all__ = ["COMMANDS", "Commands", "option_value"]

COMMANDS = {
    "help": ("/help", "list the commands"),
    "method": ("/method [SPEC]", "choose the method, as in /method svip; alone: show it"),
    "set": ("/set [OPTION VALUE]", "change one, as in /set temperature 0.7; alone: list all"),
    "system": ("/system [TEXT]", 'set the system prompt ("" removes it); alone: show it'),
    "history": ("/history", "show the conversation"),
    "retry": ("/retry", "answer the last message again, with the next seed"),
    "undo": ("/undo", "remove the last turn"),
    "drop": ("/drop [N]", "remove the N oldest turns (1)"),
    "reset": ("/reset", "remove all turns"),
    "save": ("/save FILE", "write JSON, or Markdown (*.md); /save! replaces a file"),
    "load": ("/load FILE", "continue a chat that was saved as JSON"),
    "quit": ("/quit", "end the chat"),
}
"""Commands by name: how each is written, and what it does."""
_KEYS = {
    '"""': "begins and ends a message of several lines",
    "//": "begins a message whose first character is /",
    "Alt-Enter": "breaks a line of any message",
    "Tab, Ctrl-R": "completes what is typed, finds an earlier entry",
    "Ctrl-C": "stops the answer, whose text so far is kept",
    "Ctrl-D": "ends the chat, as Ctrl-C does at the prompt, twice",
}


class Commands:
    """Runs what is typed in one chat.

    Answers go to standard output, coloured by origin on a terminal; notes to the terminal, else to standard error.

    Args:
        json: standard output is for one JSON object at the end: answers go to standard error, too.
    """

    def __init__(self, chat: Session, *, json: bool = False) -> None:
        from rich.console import Console

        self.chat = chat
        self._own: set[Path] = set()  # files of chats that this one wrote or continues, which it may replace
        coloured = sys.stdout.isatty() and not json
        file = sys.stdout if coloured else sys.stderr
        self._notes = Console(file=file, highlight=False, soft_wrap=not coloured)
        self._page = TerminalPage() if coloured else Page(sys.stderr if json else sys.stdout)

    def note(self, text: str, style: str = "dim") -> None:
        """Print lines about the chat, if there are any."""
        from rich.text import Text

        if text:
            self._notes.print(Text(harmless(text), style))

    def welcome(self) -> None:
        """Name the models, the method and the way out; on a terminal also the legend of the colours."""
        models, drafting = self.chat.pair.models, self.chat.pair.drafting
        draft = "" if models.draft is None else f", draft {models.draft.id}"
        draft += "" if drafting is None else f", {drafting.kind} heads"
        self.note(f"target {models.target.id}{draft}, method {self.chat.method.name}")
        self.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
        if isinstance(self._page, TerminalPage):
            self._notes.print(legend())

    def error(self, error: Exception) -> None:
        """Print what went wrong, as one line; after half an answer on a new line."""
        self._page.break_off()
        line = " ".join(str(error).split())
        if not isinstance(error, SprinterError):  # a fault of ours or of a model's code
            line = f"{type(error).__name__}: {first_line(error)[:300]}; /save keeps the chat"
        self.note(f"error: {line}", "bold")

    def run(self, entry: str) -> bool:
        """Answer a message, or run a command; returns whether Ctrl-C stopped an answer.

        Raises:
            UserError: no such command, or wrong arguments; nothing has changed.
            EOFError: the command ends the chat.
        """
        chat = self.chat
        if not entry.startswith("/") or entry.startswith("//"):
            return self._answer(lambda show: chat.ask(entry[entry.startswith("//") :], show))
        name, *more = entry[1:].split(maxsplit=1) or [""]
        rest = more[0].strip() if more else ""
        if (known := COMMANDS.get("save" if name == "save!" else name)) is None:
            raise UserError(f"there is no command /{name}: see /help; // begins a message that starts with /")
        if rest and known[0] == f"/{name}":
            raise UserError(f"/{name} takes nothing after it: give /{name} alone")
        if not rest and "FILE" in known[0]:
            raise UserError(f"/{name} needs a file: give /{name} FILE")
        match name:
            case "help":
                self._table(dict(COMMANDS.values()) | _KEYS)
            case "method":
                if rest:
                    chat.change(method=rest)
                self.note(f"method {chat.method.name}")
            case "set":
                self._set(rest)
            case "system":
                if rest:
                    chat.restore(None if rest in ('""', "''") else rest, chat.turns, chat.options)
                self.note("no system prompt" if chat.system is None else f"system prompt: {chat.system}")
            case "history":
                self.note("" if chat.system is None else f"system prompt: {chat.system}")
                for number, turn in enumerate(chat.turns, 1):
                    self.note(f"{number}> {turn.user}", "bold")
                    self.note(turn.answer, "")
                    self.note(turn.meter)
                self.note("" if chat.turns else "no turns yet")
            case "retry":
                return self._answer(chat.retry)
            case "save" | "save!":
                self._save(_path(rest), replace=name == "save!")
            case "quit":
                raise EOFError
            case _:
                self._turns(name, rest)
        return False

    def _answer(self, ask: Callable[[Callable[[Token], None]], Generation]) -> bool:
        before = self.chat.turns
        out = ask(self._page.add)
        self._page.finish(out)
        if cancelled := out.stopped:
            dropped = "there was no text, and the message is dropped"
            self.note(f"stopped: {'the text so far is kept' if out.tokens else dropped}")
        self.note("" if self.chat.turns is before else self.chat.turns[-1].meter)
        if out.finish_reason == "length":
            limit = len(out.tokens)
            self.note(f"the answer was cut off: max_new_tokens is {limit} (/set max_new_tokens {2 * limit})")
        return cancelled

    def _table(self, rows: Mapping[str, str]) -> None:
        width = max(map(len, rows))
        self.note("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()))

    def _set(self, rest: str) -> None:
        values = self.chat.options.to_dict()
        if rest:
            keyword = rest.partition("=")[0].isidentifier()  # name=value, not name value
            name, _, text = (rest.replace("=", " ", 1) if keyword else rest).partition(" ")
            if name not in values:
                check_name(name)  # raises, with the nearest name
                raise UserError(f"/set takes one of {', '.join(values)}: give /set temperature 0.7")
            if text.strip():
                self.chat.change(**{name: option_value(text.strip())})
            values = {name: self.chat.options.to_dict()[name]}
        self._table({name: _spelled(value) for name, value in values.items()})

    def _save(self, path: Path, *, replace: bool) -> None:
        if not replace and path.absolute() not in self._own and os.path.lexists(path):
            raise UserError(f"'{path}' exists already: /save! replaces it, or give another name")
        chat = self.chat
        text = chat.markdown() if path.suffix == ".md" else json.dumps(chat.to_dict(), indent=1) + "\n"
        try:
            write_atomic(path, text)
        except OSError as error:
            raise UserError(f"cannot write '{path}' ({error.strerror}): give another file") from None
        self._own.add(path.absolute())
        self.note(f"saved as {path}")

    def _turns(self, name: str, rest: str) -> None:
        """Remove turns, or take those of a file, and tell how many are left."""
        if name == "undo":
            self.chat.drop(1, newest=True)
        elif name == "reset":
            self.chat.turns = ()
        elif name == "drop":
            if rest and not (rest.isdecimal() and len(rest) < 10):
                raise UserError(f"/drop {rest[:20]} is not a number of turns: give /drop 2")
            self.chat.drop(int(rest or 1))
        else:
            self._load(_path(rest))
        count = len(self.chat.turns)
        self.note(f"the conversation has {count or 'no'} turn{'' if count == 1 else 's'}")
        if name == "load":
            self.note(f"method {self.chat.method.name}; /history shows the turns, /set the options")

    def _load(self, path: Path) -> None:
        value = read_json(path, f"'{path}'", "a file that /save wrote, not .md")
        try:
            if self.chat.load(value):
                self._own.add(path.absolute())
        except UserError as error:
            raise UserError(f"'{path}': {error}") from None


def _path(text: str) -> Path:
    """The path that was typed; ~ is a home directory."""
    if "\0" in text:
        raise UserError("a file's name has no zero byte: give another name")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(f"cannot find the directory of '{text}' ({error}): give its full path") from None


def option_value(text: str) -> Any:
    """The value of an option as it is typed: JSON, ``none``, or else the text itself."""
    if text == "none":
        return None
    try:
        return json.loads(text, parse_constant=str)  # NaN is no JSON
    except ValueError:
        return text


def _spelled(value: Any) -> str:
    """The value of an option as /set takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and option_value(value) == value else json.dumps(value)
