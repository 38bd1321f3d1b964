"""How many tokens to draft between two looks of the host, chosen from what a look and a step cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

__all__ = ["AUTO", "MOST", "Ahead", "best_ahead"]

AUTO = "auto"
MOST = 8
"""Most tokens that are drafted ahead by our own choice."""
_TRIALS = 4  # looks; the first of a length may load code


def best_ahead(look_s: float, step_s: float, goes_on: float) -> int:
    """The k with the fewest seconds a draft run, 1 to ``MOST``.

    A run that goes on after each token with the same chance r needs 1 / (1 − r^k) looks of k steps on average; what was
    drafted beyond its end is thrown away.

    Args:
        look_s: seconds of a look at the host's side, whatever the number of steps.
        step_s: seconds of a draft step.
        goes_on: r, below 1.
    """
    return min(range(1, MOST + 1), key=lambda k: (look_s + k * step_s) / (1 - goes_on**k))


@dataclass(slots=True)
class Ahead:
    """Learns the costs and the length of runs of one request.

    Args:
        fixed: always so many; None: choose. The first looks take one and two tokens by turns, which tells both costs.
    """

    fixed: int | None
    _fastest: dict[int, float] = field(default_factory=dict)
    _looks: int = 0
    _runs: int = 0
    _kept: int = 0

    def next(self) -> int:
        """Tokens to draft before the next look."""
        if self.fixed is not None:
            return self.fixed
        if self._looks < _TRIALS or not {1, 2} <= self._fastest.keys():
            return 1 + self._looks % 2
        step_s = max(self._fastest[2] - self._fastest[1], 1e-9)
        look_s = max(self._fastest[1] - step_s, 0.0)
        return best_ahead(look_s, step_s, (self._kept + 1) / (self._kept + self._runs + 2))

    def looked(self, steps: int, seconds: float) -> None:
        """A look with so many steps took so long; the fastest one counts, for others may have had the machine."""
        self._looks += 1
        self._fastest[steps] = min(seconds, self._fastest.get(steps, inf))

    def ended(self, kept: int) -> None:
        """A run ended; so many of its tokens had a successor."""
        self._runs += 1
        self._kept += max(0, kept)
