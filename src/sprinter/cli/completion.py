"""Shell completion of option values."""

from __future__ import annotations

__all__ = ["complete_method"]


def complete_method(incomplete: str) -> list[str]:
    """Names of methods, and "auto", that begin with the given text. Imports torch: the first Tab takes seconds."""
    from sprinter.decode import METHODS

    return [name for name in (*METHODS.names(), "auto") if name.startswith(incomplete)]
