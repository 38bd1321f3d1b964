"""What a shell completes beyond the options' names."""

from __future__ import annotations

__all__ = ["complete_method"]


def complete_method(incomplete: str) -> list[str]:
    """Names of methods that begin so. They know themselves once torch is imported: the first Tab takes seconds."""
    from sprinter.decode import METHODS

    return [name for name in METHODS.names() if name.startswith(incomplete)]
