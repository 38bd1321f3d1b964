"""Which rows read their prompts in a step, where not all do: owners take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["NEW", "ChunkTurn", "choose_prompts"]

_Owned = TypeVar("_Owned")

NEW = 16
"""A new row is taken for one that has waited for this many steps: it goes before those that have waited less."""


@dataclass(frozen=True, slots=True)
class ChunkTurn(Generic[_Owned]):
    """A row that has a chunk of its prompt to read.

    Attributes:
        owner: whose it is.
        turn: step in which it read last; ``NEW`` steps before it came, if it has not read.
        size: number of tokens of the chunk.
        chunk: the same for rows that read the same, which is read once.
    """

    row: _Owned
    owner: str
    turn: int
    size: int
    chunk: Hashable


def choose_prompts(rows: Sequence[ChunkTurn[_Owned]], turns: dict[str, int], most: int) -> list[_Owned]:
    """The rows that read now: as many as fit into ``most`` tokens in the order of their turns, and at least one.

    Args:
        turns: of each owner the step in which a prompt of theirs was read last.
    """
    place = Counter[str]()  # among the rows of its owner
    order: list[tuple[int, int, int, ChunkTurn[_Owned]]] = []
    for one in sorted(rows, key=lambda one: one.turn):
        order.append((place[one.owner], turns[one.owner], len(order), one))
        place[one.owner] += 1
    chosen: list[_Owned] = []
    read: set[Hashable] = set()
    left = most
    for *_, one in sorted(order, key=lambda entry: entry[:3]):
        cost = 0 if one.chunk in read else one.size
        if cost <= left or not chosen:
            chosen.append(one.row)
            read.add(one.chunk)
            left -= cost
    return chosen
