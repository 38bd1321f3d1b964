"""The switch SPRINTER_DEBUG."""

from __future__ import annotations

import os

__all__ = ["debugging"]


def debugging() -> bool:
    """Whether SPRINTER_DEBUG asks for tracebacks and for the libraries' own messages."""
    return os.environ.get("SPRINTER_DEBUG", "") not in ("", "0")
