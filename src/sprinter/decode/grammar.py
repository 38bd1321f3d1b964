"""What a grammar says of a text: which tokens may follow it, and which must."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

from torch import Tensor

__all__ = ["Grammar"]


class Grammar(Protocol):
    """The grammar of one text. Texts are token ids without the prompt; an answer depends on its text alone, not on what
    was asked before."""

    def masks(self, texts: Sequence[Sequence[int]]) -> Future[Tensor]:
        """Begin to find which tokens may follow each text: bool ``[n, V]`` on the CPU.

        At least one token may follow a text that the grammar allows and that no end has ended; any may follow others.
        """

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> Future[int]:
        """Begin to find the number of the first tokens that may follow a text one after the other."""

    def forced(self, text: Sequence[int]) -> Future[Sequence[int]]:
        """Begin to find tokens that must follow a text, in their usual spelling if the grammar allows others of the
        same bytes."""
