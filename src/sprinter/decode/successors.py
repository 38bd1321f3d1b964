"""What the target held most probable after each token, the last time that it read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["Successors"]


class Successors:
    """Each token's most probable successor under the target's latest law after it, whatever stood before: four bytes
    for each token id."""

    def __init__(self) -> None:
        self._after = np.zeros(0, np.int32)

    def note(self, tokens: Sequence[int], likeliest: Sequence[int]) -> None:
        """Keep the most probable token after each of the first tokens; of equal tokens the last counts."""
        tokens = list(tokens[: len(likeliest)])
        known = len(self._after)
        if tokens and (most := max(tokens)) >= known:
            self._after = np.append(self._after, np.full(max(known, most + 1 - known), -1, np.int32))
        self._after[tokens] = likeliest

    def walk(self, token: int, length: int) -> list[int]:
        """From a token to its successor, and on from there; fewer than ``length`` tokens where one is not known."""
        found: list[int] = []
        while len(found) < length and token < len(self._after) and (token := int(self._after[token])) >= 0:
            found.append(token)
        return found
