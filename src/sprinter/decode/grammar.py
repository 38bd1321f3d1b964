"""What a grammar says of a text: which tokens may follow it, and which must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Grammar"]

Text = Sequence[int]
"""Token ids of a text without its prompt."""


class Grammar(Protocol):
    """The grammar of one text; an answer depends on the text that is given alone, whatever was asked before."""

    def masks(self, texts: Sequence[Text]) -> Callable[[], Tensor]:
        """Begin to find which tokens may follow each text; the result waits for them: bool ``[n, V]`` on the CPU.

        At least one token may follow a text that the grammar allows and that no end has ended; any may follow others.
        """

    def kept(self, text: Text, tokens: Text) -> int:
        """Number of the first tokens that may follow a text one after the other."""

    def forced(self, text: Text) -> Text:
        """Tokens that must follow a text, in their usual spelling if the grammar allows others of the same bytes."""
