"""The loop of a chat: read an entry, answer it or run it, until the input ends."""

from __future__ import annotations

from typing import Protocol

from sprinter.cli.chat_commands import Commands
from sprinter.cli.chat_screen import Screen
from sprinter.cli.chat_session import Session
from sprinter.errors import SprinterError, UserError

__all__ = ["Lines", "converse", "read_entry"]

_QUOTES = '"""'


class Lines(Protocol):
    """Where lines come from.

    Attributes:
        interactive: whether a person types them.
    """

    interactive: bool

    def read(self, prompt: str) -> str:
        """The next line, without its end.

        Raises:
            EOFError: there is none.
            UserError: it is no text.
        """


def converse(chat: Session, lines: Lines, screen: Screen) -> int:
    """Run a chat until its input ends; returns the exit status.

    A mistake is one line, and the chat goes on. Where nobody types, the exit status is then 2 (1 for an error that is
    not the user's), and Ctrl-C ends the chat at once (130).
    """
    commands, status, interrupted = Commands(chat, screen), 0, False
    while not commands.ended:
        try:
            entry = read_entry(lines)
            interrupted = False
            if entry is None:
                continue
            stopped = _answer(chat, commands, screen, entry)
            if stopped and not lines.interactive:
                return 130
        except EOFError:
            if lines.interactive:
                screen.line_break()
            break
        except KeyboardInterrupt:
            screen.line_break()
            if interrupted or not lines.interactive:
                return 130
            interrupted = True
            screen.note("Ctrl-C again, Ctrl-D or /quit ends the chat")
        except SprinterError as error:
            screen.error(error)
            status = 2 if isinstance(error, UserError) else 1
        except Exception as error:  # a fault of ours or of a model's code must not lose the conversation
            lines_of = str(error).strip().splitlines() or ["no message"]
            screen.error(SprinterError(f"{type(error).__name__}: {lines_of[0][:300]}; /save keeps the chat"))
            status = 1
    return 0 if lines.interactive else status


def _answer(chat: Session, commands: Commands, screen: Screen, entry: str) -> bool:
    """Answer a message or run a command; returns whether Ctrl-C stopped an answer."""
    if entry.startswith("/") and not entry.startswith("//"):
        commands.run(entry)
        return commands.stopped
    turns = chat.turns
    out = chat.ask(entry[entry.startswith("//") :], screen.show)
    screen.end(out, "" if chat.turns is turns else chat.turns[-1].meter)
    return out.finish_reason == "cancelled"


def read_entry(lines: Lines) -> str | None:
    """The next message or command; None for a blank line.

    A line that begins with three quotes begins a message of several lines, which ends with three quotes; it is never a
    command.

    Raises:
        EOFError: the input has ended.
        UserError: it ended within a message of several lines, or holds a line that is no text.
    """
    line = lines.read("> ")
    if not line.startswith(_QUOTES):
        return line if line.strip() else None
    parts = [line.removeprefix(_QUOTES)]
    wrong: UserError | None = None
    while not parts[-1].rstrip().endswith(_QUOTES):
        try:
            parts.append(lines.read("... "))
        except UserError as error:  # the rest of the message is no message of its own
            wrong = wrong or error
        except EOFError:
            raise UserError(
                f"the input ended within a message of several lines: end it with {_QUOTES}"
            ) from None
    if wrong is not None:
        raise wrong
    parts[-1] = parts[-1].rstrip().removesuffix(_QUOTES)
    text = "\n".join(parts).strip("\n")
    if not text.strip():
        return None
    return f"/{text}" if text.startswith("/") else text
