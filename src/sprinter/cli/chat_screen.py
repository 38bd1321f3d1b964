"""What a chat shows: answers token by token, and notes, which never mix with the answers of a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sprinter.cli.pages import PlainPage, TerminalPage, harmless, legend

if TYPE_CHECKING:
    from sprinter.cli.chat_session import Session, Turn
    from sprinter.decode.draft import Token
    from sprinter.engine.generation import Generation

__all__ = ["Screen"]


class Screen:
    """Answers go to standard output, coloured by origin on a terminal; notes to the terminal, else to standard error.

    Args:
        json: standard output is for one JSON object at the end: answers go to standard error, too.
    """

    def __init__(self, *, json: bool = False) -> None:
        from rich.console import Console

        self._json = json
        self.coloured = sys.stdout.isatty() and not json
        file = sys.stdout if self.coloured else sys.stderr
        self._notes = Console(file=file, highlight=False, soft_wrap=not self.coloured)
        self._page: TerminalPage | PlainPage | None = None

    def welcome(self, chat: Session) -> None:
        """Name the models, the method and the way out; on a terminal also the legend of the colours."""
        models = chat.pair.models
        draft = "" if models.draft is None else f", draft {models.draft.id}"
        if chat.pair.drafting is not None:
            draft += f", {chat.pair.drafting.kind} heads"
        self.note(f"target {models.target.id}{draft}, method {chat.method.name}")
        self.note("/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends the chat")
        if self.coloured:
            self._notes.print(legend())

    def show(self, token: Token) -> None:
        """Print the next token of an answer."""
        if self._page is None:
            self._page = self._new_page()
        self._page.add(token)

    def end(self, out: Generation, meter: str) -> None:
        """Print the rest of an answer, the meter line, and how the answer ended if that was not its own end."""
        (self._page or self._new_page()).finish(out)
        self._page = None
        if out.finish_reason == "cancelled":
            kept = (
                "the text so far is kept" if out.tokens else "there was no text, and the message is dropped"
            )
            self.note(f"stopped: {kept}")
        if meter:
            self.note(meter)
        if out.finish_reason == "length":
            limit = len(out.tokens)
            self.note(f"the answer was cut off: max_new_tokens is {limit} (/set max_new_tokens {2 * limit})")

    def note(self, text: str) -> None:
        """Print lines about the chat."""
        from rich.text import Text

        self._notes.print(Text(harmless(text), "dim"))

    def error(self, error: Exception) -> None:
        """Print what went wrong, as one line; after half an answer on a new line."""
        from rich.text import Text

        if self._page is not None:
            self._page.line_break()
            self._page = None
        line = " ".join(str(error).split())
        self._notes.print(Text(f"error: {harmless(line)}", "bold"))

    def line_break(self) -> None:
        """End a line that the user left with Ctrl-C or Ctrl-D."""
        self._page = None
        self._notes.print()

    def turn(self, number: int, turn: Turn) -> None:
        """Print an earlier turn."""
        from rich.text import Text

        self._notes.print(Text(f"{number}> {harmless(turn.user)}", "bold"))
        self._notes.print(Text(harmless(turn.answer)))
        if turn.meter:
            self.note(turn.meter)

    def _new_page(self) -> TerminalPage | PlainPage:
        return TerminalPage() if self.coloured else PlainPage(sys.stderr if self._json else sys.stdout)
