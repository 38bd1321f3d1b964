"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sprinter.cli.chat_files import load_chat, save_chat
from sprinter.engine.options import default_of
from sprinter.errors import UserError

if TYPE_CHECKING:
    from sprinter.cli.chat_screen import Screen
    from sprinter.cli.chat_session import Session

__all__ = ["COMMANDS", "Commands", "option_value"]


class Command(NamedTuple):
    """A command: how it is written, what it does."""

    usage: str
    about: str


COMMANDS = {
    "help": Command("/help", "list the commands"),
    "method": Command("/method [SPEC]", "choose the method, e.g. /method sprinter(tau=0.6); alone: show it"),
    "set": Command("/set [OPTION VALUE]", "change an option, e.g. /set temperature 0.7; alone: list all"),
    "system": Command("/system [TEXT]", 'set the system prompt ("" removes it); alone: show it'),
    "history": Command("/history", "show the conversation"),
    "retry": Command("/retry", "answer the last message again, with the next seed"),
    "undo": Command("/undo", "remove the last turn"),
    "drop": Command("/drop [N]", "remove the N oldest turns (1)"),
    "reset": Command("/reset", "remove all turns"),
    "save": Command("/save FILE", "write the chat as JSON, or as Markdown (*.md); /save! replaces a file"),
    "load": Command("/load FILE", "continue a chat that was saved as JSON"),
    "quit": Command("/quit", "end the chat"),
}
"""The commands by name, in the order of /help."""

_INPUT = (
    ('"""', "begins and ends a message of several lines (with GNU readline also Alt-Enter)"),
    ("//", "begins a message whose first character is /"),
    (
        "Ctrl-C",
        "stops the answer, whose text so far is kept; twice at the prompt ends the chat, as Ctrl-D does",
    ),
)


class Commands:
    """Runs the commands of one chat.

    Attributes:
        ended: whether the user has ended the chat.
        stopped: whether Ctrl-C stopped the answer of the last command.
    """

    def __init__(self, chat: Session, screen: Screen) -> None:
        self._chat, self._screen = chat, screen
        self._own: set[Path] = set()  # files of chats that this one wrote or continues, which it may replace
        self.ended = self.stopped = False

    def run(self, line: str) -> None:
        """Run one command, given with its slash.

        Raises:
            UserError: no such command, or wrong arguments; nothing has changed.
        """
        words = line[1:].split(maxsplit=1)
        name, rest = words[0] if words else "", words[1].strip() if len(words) > 1 else ""
        self.stopped = False
        known = COMMANDS.get("save" if name == "save!" else name)
        if known is None:
            raise UserError(f"there is no command /{name}: see /help; // begins a message that starts with /")
        if rest and "[" not in known.usage and "FILE" not in known.usage:
            raise UserError(f"/{name} takes nothing after it: give /{name} alone")
        if not rest and "FILE" in known.usage:
            raise UserError(f"/{name} needs a file: give {known.usage.replace('save', name)}")
        run: Callable[[str], None] = getattr(self, f"_{name.replace('!', '_over')}")
        run(rest)

    def _help(self, rest: str) -> None:
        rows = [(one.usage, one.about) for one in COMMANDS.values()] + list(_INPUT)
        width = max(len(usage) for usage, _ in rows)
        self._screen.note("\n".join(f"{usage:<{width}}  {about}" for usage, about in rows))

    def _method(self, rest: str) -> None:
        if rest:
            self._chat.change(method=rest)
        self._screen.note(f"method {self._chat.method.name}")

    def _set(self, rest: str) -> None:
        values = self._chat.options.to_dict()
        if rest:
            name, _, text = (
                rest.replace("=", " ", 1).partition(" ") if _is_keyword(rest) else rest.partition(" ")
            )
            if name not in values:
                default_of(name)  # raises, with the nearest name
                raise UserError(f"/set takes one of {', '.join(values)}: give /set temperature 0.7")
            if text.strip():
                self._chat.change(**{name: option_value(text.strip())})
            values = {name: self._chat.options.to_dict()[name]}
        width = max(map(len, values))
        self._screen.note("\n".join(f"{name:<{width}}  {_spelled(value)}" for name, value in values.items()))

    def _system(self, rest: str) -> None:
        if rest:
            self._chat.instruct(None if rest in ('""', "''") else rest)
        self._screen.note(
            "no system prompt" if self._chat.system is None else f"system prompt: {self._chat.system}"
        )

    def _history(self, rest: str) -> None:
        if self._chat.system is not None:
            self._screen.note(f"system prompt: {self._chat.system}")
        if not self._chat.turns:
            self._screen.note("no turns yet")
        for number, turn in enumerate(self._chat.turns, 1):
            self._screen.turn(number, turn)

    def _retry(self, rest: str) -> None:
        out = self._chat.retry(self._screen.show)
        self._screen.end(out, self._chat.turns[-1].meter)
        self.stopped = out.finish_reason == "cancelled"

    def _undo(self, rest: str) -> None:
        self._chat.undo()
        self._left()

    def _drop(self, rest: str) -> None:
        if rest and not (rest.isdecimal() and len(rest) < 10):
            raise UserError(f"/drop {rest[:20]} is no number of turns: give /drop 2")
        self._chat.drop(int(rest or 1))
        self._left()

    def _reset(self, rest: str) -> None:
        self._chat.reset()
        self._left()

    def _left(self) -> None:
        count = len(self._chat.turns)
        self._screen.note(f"the conversation has {count or 'no'} turn{'' if count == 1 else 's'}")

    def _save(self, rest: str, replace: bool = False) -> None:
        path = _path(rest)
        save_chat(self._chat, path, replace=replace or path.absolute() in self._own)
        self._own.add(path.absolute())
        self._screen.note(f"saved as {path}")

    def _save_over(self, rest: str) -> None:
        self._save(rest, replace=True)

    def _load(self, rest: str) -> None:
        path = _path(rest)
        if load_chat(self._chat, path):
            self._own.add(path.absolute())
        self._left()
        self._screen.note(f"method {self._chat.method.name}; /history shows the turns, /set the options")

    def _quit(self, rest: str) -> None:
        self.ended = True


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


def _is_keyword(text: str) -> bool:
    """Whether this is ``name=value`` and not ``name value``."""
    return text.partition("=")[0].isidentifier()


def _spelled(value: Any) -> str:
    """The value of an option as /set takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) and option_value(value) == value else json.dumps(value)
