"""``sprinter chat``: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from sprinter.cli.chat_commands import COMMANDS, Commands
from sprinter.cli.chat_session import Session
from sprinter.cli.generating import AT_DEFAULTS, generates
from sprinter.cli.loading import Loading, check_models, load, loads
from sprinter.cli.options import JsonOption, complete_method
from sprinter.cli.pages import print_json
from sprinter.cli.signature import option
from sprinter.engine.options import GenerationOptions
from sprinter.errors import UserError

__all__ = ["candidates", "chat", "converse", "history_file", "read_entry", "typed_entries"]

_MOST_BYTES = 16 * 2**20  # an endless line must not fill the memory
_QUOTES = '"""'


@loads()
@generates(max_new_tokens=512)
def chat(
    options: GenerationOptions = AT_DEFAULTS,
    loading: Loading = Loading(),
    system: Annotated[str | None, option("System prompt.", default="the template's own")] = None,
    prefix_reuse: Annotated[
        Literal["exact", "all"],
        option(
            "What a turn reuses of earlier turns. all: everything that was read. exact: what leaves texts the "
            "same to the bit: whole blocks of prompts; on a CPU with --dtype gguf, int8 or int4 all but trees' nodes."
        ),
    ] = "all",
    json: JsonOption = False,
) -> int:
    """Talk to a chat model; show the origin of each token, and what each answer cost.

    Reads messages and commands (/help) from the terminal, or from standard input, one on a line.
    """
    if loading.target is None and loading.template is None:
        raise UserError(
            "the built-in models are no chat models: give --target (and --draft) with a chat template, "
            "or --template FILE"
        )
    check_models(options, loading)
    typed = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
    print("loading the models ...", file=sys.stderr, flush=True)
    pair = load(loading, prefix_reuse=prefix_reuse)
    commands = Commands(Session(pair, options, system), json=json)
    read = typed_entries(commands.note) if typed else piped_entries()
    if typed:
        commands.welcome()
    status = converse(commands, read, typed=typed)
    if json:
        print_json(commands.chat.to_dict())
    return status


def converse(commands: Commands, read: Callable[[str], str], *, typed: bool) -> int:
    """Read entries and run them until the input ends; returns the exit status.

    A mistake is one line, and the chat goes on. Where nobody types, the exit status is then 2 (1 for an error that is
    not the user's), and Ctrl-C ends the chat at once (130).
    """
    status, interrupted = 0, False
    while True:
        try:
            entry = read_entry(read)
            interrupted = False
            if entry is not None and commands.run(entry) and not typed:
                return 130
        except EOFError:
            return 0 if typed else status
        except KeyboardInterrupt:
            if interrupted or not typed:
                return 130
            interrupted = True
            commands.note("Ctrl-C again, Ctrl-D or /quit ends the chat")
        except Exception as error:  # a fault must not lose the conversation
            commands.error(error)
            status = 2 if isinstance(error, UserError) else 1


def read_entry(read: Callable[[str], str]) -> str | None:
    """The next message or command; None for a blank line.

    A line that begins with three quotes begins a message, never a command, which ends with three quotes.

    Args:
        read: returns the next line, or a whole entry, below the prompt that it is given.

    Raises:
        EOFError: the input has ended. UserError: it has ended within a message.
    """
    entry = read("> ")
    while _is_open(entry):
        try:
            entry += "\n" + read("... ")
        except EOFError:
            raise UserError(
                f"the input ended within a message of several lines: end it with {_QUOTES}"
            ) from None
    if entry.startswith(_QUOTES):
        entry = entry.removeprefix(_QUOTES).rstrip().removesuffix(_QUOTES).strip("\n")
        entry = f"/{entry}" if entry.startswith("/") else entry
    return entry if entry.strip() else None


def _is_open(entry: str) -> bool:
    """Whether this begins a message of several lines that goes on."""
    return entry.startswith(_QUOTES) and not entry.removeprefix(_QUOTES).rstrip().endswith(_QUOTES)


def piped_entries() -> Callable[[str], str]:
    """Reads lines of standard input; the prompt is not shown."""
    if sys.stdin is None or sys.stdin.closed:
        raise UserError("standard input is closed: type or pipe messages, one on a line")

    def lines() -> Iterator[str]:
        for line in iter(lambda: sys.stdin.buffer.readline(_MOST_BYTES), b""):
            if len(line) == _MOST_BYTES:
                raise UserError(f"a line of standard input exceeds {_MOST_BYTES >> 20} MiB: shorten it")
            yield line.decode(errors="surrogateescape").rstrip("\r\n")

    found = lines()

    def read(prompt: str) -> str:
        if (line := next(found, None)) is None:
            raise EOFError
        return line

    return read


def typed_entries(warn: Callable[[str], None]) -> Callable[[str], str]:
    """Reads entries at a terminal, with prompt_toolkit; Enter ends one, but not within three quotes.

    Args:
        warn: prints a line: the history cannot be kept.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import DynamicCompleter, WordCompleter
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output
    from prompt_toolkit.shortcuts import CompleteStyle

    keys = KeyBindings()
    history: History = InMemoryHistory()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    def completer() -> WordCompleter:
        return WordCompleter(candidates(session.default_buffer.document.text_before_cursor), WORD=True)

    if (file := history_file()) is not None:
        try:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))  # nobody else reads what was typed
            history = FileHistory(str(file))
        except OSError as error:
            warn(
                f"cannot write the input history '{file}' ({error.strerror}): set SPRINTER_HISTORY to another file, or "
                "to nothing for none"
            )
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, completer=DynamicCompleter(completer), complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,  # no empty lines below the prompt, where a menu would be
        multiline=Condition(lambda: _is_open(session.default_buffer.text)), prompt_continuation="... ",
        output=create_output(always_prefer_tty=True),  # standard output may be a file of answers
    )  # fmt: skip
    return session.prompt


def history_file() -> Path | None:
    """Where the input history is: ``SPRINTER_HISTORY`` (empty: nowhere), else in the user's state directory."""
    if (own := os.environ.get("SPRINTER_HISTORY")) is not None:
        return Path(own).expanduser() if own else None
    root = os.environ.get("XDG_STATE_HOME")
    return (Path(root) if root else Path.home() / ".local" / "state") / "sprinter" / "chat_history"


def candidates(line: str) -> list[str]:
    """What the last word of a line may become: commands, after /method its names, after /set the options."""
    from sprinter.engine.options import GenerationOptions

    match line.split(" "):
        case [word] if word.startswith("/"):
            return [f"/{name}{' ' * (' ' in usage)}" for name, (usage, _) in COMMANDS.items()]
        case ["/method", _]:
            return complete_method("")
        case ["/set", _]:
            return [f"{name} " for name in GenerationOptions().to_dict()]
    return []
