"""Rules and methods by name, built-in or added by other packages through entry points.

Groups: ``sprinter.trust``, ``sprinter.stop``, ``sprinter.accept`` (rule classes), ``sprinter.drafter`` (drafter
classes) and ``sprinter.methods`` (functions that return a Method). A plug-in cannot replace a built-in name.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from sprinter.errors import SprinterError, did_you_mean, nearest

__all__ = ["ACCEPT", "DRAFTER", "METHODS", "STOP", "TRUST", "Registry", "did_you_mean", "nearest"]

Item = TypeVar("Item", bound=Callable[..., Any])


class Registry:
    """Factories by name, for one kind of object. Entry points are read once, on an unknown name or for a listing."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self._group = group
        self._items: dict[str, Callable[..., Any]] = {}
        self._loaded = False

    def add(self, name: str, item: Callable[..., Any]) -> None:
        """Register ``item``; raises a ValueError if the name is taken."""
        if name in self._items:
            raise ValueError(f"{self.kind} '{name}' is registered already")
        self._items[name] = item

    def rule(self, name: str) -> Callable[[Item], Item]:
        """Class decorator that registers the class under ``name``."""

        def register(item: Item) -> Item:
            self.add(name, item)
            return item

        return register

    def get(self, name: str) -> Callable[..., Any]:
        """The factory of this name; raises a UserError with a suggestion if there is none."""
        if name not in self._items:
            self._load_plugins()
        if name not in self._items:
            raise did_you_mean(self.kind, name, self.names())
        return self._items[name]

    def name_of(self, item: Callable[..., Any]) -> str | None:
        """The name under which an item is registered; None: it is not."""
        return next((name for name in self.names() if self._items[name] is item), None)

    def names(self) -> list[str]:
        """All names in order of registration."""
        self._load_plugins()
        return list(self._items)

    def _load_plugins(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for point in entry_points(group=self._group):
            if point.name not in self._items:
                try:
                    self._items[point.name] = point.load()
                except Exception as error:  # a plug-in's import may raise anything
                    self._loaded = False
                    raise SprinterError(
                        f"the plug-in '{point.name}' ({point.value}) of group {self._group} cannot be loaded "
                        f"({type(error).__name__}: {error}): fix or uninstall it"
                    ) from error


TRUST = Registry("trust rule", "sprinter.trust")
STOP = Registry("stop rule", "sprinter.stop")
ACCEPT = Registry("accept rule", "sprinter.accept")
DRAFTER = Registry("drafter", "sprinter.drafter")
METHODS = Registry("method", "sprinter.methods")
