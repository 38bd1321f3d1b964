"""A chat template for the tiny pair, chats with it, and lines that nobody types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tests.cli.tiny import Places

from sprinter import load_pair
from sprinter.cli.chat import converse
from sprinter.cli.chat_commands import Commands
from sprinter.cli.chat_session import Session
from sprinter.engine.options import GenerationOptions
from sprinter.engine.pair import Pair

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'forbidden' %}{{ raise_exception('this is forbidden') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_pair(places: Places, *, gate: bool = True) -> Pair:
    pair = load_pair(places.target, places.draft, gate=places.gate if gate else None)
    assert pair.tokenizer is not None
    pair.tokenizer.chat_template = TEMPLATE
    return pair


def new_chat(pair: Pair, system: str | None = None, **options: Any) -> Session:
    return Session(pair, GenerationOptions(**{"max_new_tokens": 8, **options}), system)


def nothing(token: object) -> None:
    """For answers that nobody sees."""


class Script:
    """Lines of a list; an exception among them is raised in its place, and the input ends after the last."""

    def __init__(self, lines: Iterable[str | type[BaseException]]) -> None:
        self._lines = iter(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


def played(chat: Session, *lines: str | type[BaseException], typed: bool = True) -> int:
    """Run a chat on these lines; returns the exit status."""
    return converse(Commands(chat), Script(lines), typed=typed)
