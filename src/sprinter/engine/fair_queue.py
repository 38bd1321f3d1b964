"""What several owners share: a queue in which they take turns, and places that none of them fills."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from typing import Generic, TypeVar

__all__ = ["FairQueue", "Shares"]

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

    def of(self, owner: str | None) -> int:
        """Number of items of one owner; of None, who is nobody, 0."""
        return len(self._lines.get(owner, ())) if owner is not None else 0

    def put(self, owner: str, item: Queued) -> None:
        """Add an item at the end of its owner's line."""
        self._lines.setdefault(owner, deque()).append(item)

    def pop(self, but: Collection[str] = ()) -> Queued:
        """Remove and return the next item, of another owner than those of ``but``.

        Raises:
            IndexError: there is none.
        """
        owner = next((one for one in self._lines if one not in but), None)
        if owner is None:
            raise IndexError("the queue is empty")
        line = self._lines.pop(owner)
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


class Shares:
    """Places of which an owner may take as many as it leaves free, so that none takes them all.

    Any number of owners leaves a place for the next, and none needs a quota. Not thread-safe.

    Args:
        size: number of places. shared: False: an owner may take them all.
        own: places that each owner may take besides, if there are any.
    """

    def __init__(self, size: int, *, shared: bool = True, own: int = 0) -> None:
        self._size, self._shared, self._own = size, shared, own
        self._taken: Counter[str] = Counter()

    @property
    def free(self) -> int:
        """Number of places that nobody has taken."""
        return self._size - self._taken.total()

    def of(self, owner: str) -> int:
        """Number of places that an owner has taken."""
        return self._taken[owner]

    def others(self, owner: str) -> bool:
        """Whether another owner has taken a place."""
        return self._taken.total() > self._taken[owner]

    def room(self, owner: str) -> int:
        """Number of places that an owner may take now; 0 or less: none."""
        free = self.free
        return min(free, free + self._own - self._taken[owner]) if self._shared else free

    def fits(self, owner: str, count: int) -> bool:
        """Whether an owner may take so many places, one after the other."""
        free = self.free - (count - 1)
        own = free + self._own - self._taken[owner] - (count - 1)
        return (min(free, own) if self._shared else free) > 0

    def take(self, owner: str, count: int = 1) -> None:
        """Take places; negative: leave them."""
        self._taken[owner] += count
        if not self._taken[owner]:
            del self._taken[owner]
