"""The built-in pair, and one server a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.server import TEMPLATE, Running, builtin_pair, serving, tokens

import sprinter
from sprinter.decode.draft import Token
from sprinter.serve.message_parsing import TextParts, joined


@pytest.fixture(scope="session")
def pair() -> sprinter.Pair:
    return builtin_pair()


@pytest.fixture(scope="module")
def server(pair: sprinter.Pair) -> Iterator[Running]:
    with serving(pair, rows=4) as found:
        yield found


@pytest.fixture
def template(pair: sprinter.Pair) -> Iterator[Any]:
    """Sets the chat template of the pair's tokenizer for a test."""
    assert pair.tokenizer is not None
    yield lambda text: setattr(pair.tokenizer, "chat_template", text)
    pair.tokenizer.chat_template = TEMPLATE


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has each text of a server be a given one: its first tokens are all of it, and the others have no text."""

    def say(text: str) -> None:
        feed = TextParts.feed

        def fed(self: TextParts, given: list[Token]) -> dict[str, Any]:
            first = given and not vars(self).setdefault("begun", False)
            self.begun = True  # type: ignore[attr-defined]
            return joined(feed(self, [one]) for one in tokens(text, 3)) if first else {}

        monkeypatch.setattr(TextParts, "feed", fed)

    return say
