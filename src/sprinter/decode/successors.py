"""What the target held most probable after each token, the last time that it read it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

__all__ = ["Successors"]


class Successors:
    """Each token's most probable successor under the target's latest law after it, whatever stood before: four bytes
    for each token of the vocabulary."""

    def __init__(self) -> None:
        self._after = np.zeros(0, np.int32)

    def note(self, tokens: Sequence[int], laws: Tensor) -> None:
        """Keep what the laws ``[n, V]`` after n tokens say; of equal tokens the last counts."""
        if not len(self._after):
            self._after = np.full(laws.shape[-1], -1, np.int32)
        self._after[list(tokens)] = laws.argmax(-1).cpu().numpy()

    def walk(self, token: int, length: int) -> list[int]:
        """From a token to its successor, and on from there; fewer than ``length`` tokens where one is not known."""
        found: list[int] = []
        while len(found) < length and token < len(self._after) and (token := int(self._after[token])) >= 0:
            found.append(token)
        return found
