"""The exception tree.

``Exception``
└── ``SprinterError``: everything that this package raises on purpose
    └── ``UserError`` (also a ``ValueError``): the user's mistake; one line says what is wrong and how to mend it
"""

from __future__ import annotations

__all__ = ["SprinterError", "UserError"]


class SprinterError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(SprinterError, ValueError):
    """The user's mistake: one line that says what is wrong and how to mend it."""
