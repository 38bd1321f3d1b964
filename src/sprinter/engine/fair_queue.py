"""A queue in which several owners take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

Queued = TypeVar("Queued")


class FairQueue(Generic[Queued]):
    """Owners take turns, each with the one of its items that has waited longest.

    So an owner with a hundred items delays another owner's single one by at most one turn of each owner. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[Queued]] = OrderedDict()  # the next owner is the first one

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def of(self, owner: str) -> int:
        """Number of items of one owner."""
        return len(self._lines.get(owner, ()))

    def put(self, owner: str, item: Queued) -> None:
        """Add an item at the end of its owner's line."""
        self._lines.setdefault(owner, deque()).append(item)

    def pop(self) -> Queued:
        """Remove and return the next item.

        Raises:
            IndexError: the queue is empty.
        """
        if not self._lines:
            raise IndexError("the queue is empty")
        owner, line = self._lines.popitem(last=False)
        item = line.popleft()
        if line:
            self._lines[owner] = line  # behind the other owners
        return item

    def remove(self, owner: str, item: Queued) -> bool:
        """Remove an item; False if it is not in the queue."""
        line = self._lines.get(owner, deque())
        if item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[owner]
        return True
