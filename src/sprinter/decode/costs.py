"""What forward passes cost on a machine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sprinter.errors import UserError

__all__ = ["PassCosts"]

_ROUND = 8  # draft tokens over which ``token`` is the mean


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of forward passes on this machine.

    Attributes:
        target: (tokens of a pass, its seconds), at least two, tokens ascending from 1.
        draft: the same of a draft step, which reads so many tokens; (): drafting costs nothing, as in lookup.
    """

    target: tuple[tuple[int, float], ...]
    draft: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        for name, points in (("target", self.target), ("draft", self.draft)):
            counts = [tokens for tokens, _ in points]
            if counts[:1] != [1][: len(counts)] or len(counts) == 1 or (name == "target" and not counts):
                raise UserError(f"costs of the {name} are {points}: give two or more, the first of one token")
            if any(a >= b for a, b in pairwise(counts)) or any(not seconds > 0 for _, seconds in points):
                raise UserError(
                    f"costs of the {name} are {points}: give ascending tokens and positive seconds"
                )

    def target_s(self, tokens: float) -> float:
        """Seconds of a target pass over a (mean) number of tokens >= 1."""
        return _along(self.target, tokens)

    @property
    def step(self) -> float:
        """Cost of a draft step in units of a target pass over one token."""
        return self.draft_s(1) / self.target_s(1)

    @property
    def token(self) -> float:
        """Further cost of each token that the target reads in a pass, in the same unit."""
        return max(0.0, self.target_s(1 + _ROUND) / self.target_s(1) - 1) / _ROUND

    def draft_s(self, tokens: float) -> float:
        """Seconds of a draft step that reads a (mean) number of tokens >= 1."""
        return _along(self.draft, tokens) if self.draft else 0.0


def _along(points: Sequence[tuple[int, float]], tokens: float) -> float:
    """Between the points on a line, and beyond the last one on that of the last two."""
    right = min(len(points) - 1, max(1, bisect_right([n for n, _ in points], tokens)))
    (low, low_s), (high, high_s) = points[right - 1], points[right]
    value = low_s + (high_s - low_s) * (tokens - low) / (high - low)
    return max(high_s, value) if tokens > high else value
