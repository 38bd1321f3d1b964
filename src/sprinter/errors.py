"""The exception tree.

``Exception``
└── ``SprinterError``: everything that this package raises on purpose
    ├── ``UserError`` (also a ``ValueError``): the user's mistake; one line says what is wrong and how to fix it
    │   ├── ``OptionError`` (also a ``TypeError``): a keyword that no option has
    │   └── ``RowsError``: so many rows at a time cannot be had, or are too few for a method
    └── ``BatchError``: some of many requests failed; it holds what came of all of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BatchError", "OptionError", "RowsError", "SprinterError", "UserError"]


class SprinterError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(SprinterError, ValueError):
    """The user's mistake: one line that says what is wrong and how to fix it."""


class OptionError(UserError, TypeError):
    """A keyword that no option has; names the nearest option."""


class RowsError(UserError):
    """More rows at a time than can be had, or fewer than a method needs: no one request's mistake."""


class BatchError(SprinterError):
    """Some of many requests failed, each by an error of its own; the others were served to their end.

    Attributes:
        errors: what was raised, by the number of the request; of ``generate_batch`` by the index of the prompt.
        done: the results of the others, likewise.
        partial: what the failed ones had written, ``finish_reason`` "error".
    """

    def __init__(
        self, what: str, errors: Mapping[int, Exception], done: Mapping[int, Any], partial: Mapping[int, Any]
    ) -> None:
        first, *others = errors
        more = f"; {what} {', '.join(map(str, others))} failed too" if others else ""
        super().__init__(f"{what} {first} failed: {errors[first]}{more}")
        self.errors, self.done, self.partial = dict(errors), dict(done), dict(partial)
