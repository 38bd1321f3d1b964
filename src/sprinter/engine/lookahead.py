"""How many tokens to draft per host synchronisation, from the measured costs of a synchronisation and a draft step."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

__all__ = ["AUTO", "MOST", "Ahead", "best_ahead"]

AUTO = "auto"
MOST = 8
"""Maximum number of tokens that ``"auto"`` drafts ahead."""
_TRIALS = 4  # synchronisations; the first one with a given number of steps may load code


def best_ahead(sync_s: float, step_s: float, goes_on: float) -> int:
    """The k from 1 to ``MOST`` with the shortest expected time per draft run.

    A run that continues after each token with the same probability r needs 1 / (1 − r^k) synchronisations of k steps on
    average; tokens drafted beyond its end are dropped.

    Args:
        sync_s: seconds per host synchronisation, independent of the number of steps.
        step_s: seconds per draft step.
        goes_on: r, below 1.
    """
    return min(range(1, MOST + 1), key=lambda k: _run_s(k, sync_s, step_s, goes_on))


def _run_s(ahead: int, sync_s: float, step_s: float, goes_on: float) -> float:
    return (sync_s + ahead * step_s) / (1 - goes_on**ahead)


@dataclass(slots=True)
class Ahead:
    """Estimates the costs and the length of draft runs of one request.

    Args:
        fixed: draft this number of tokens every time; None: choose the number.
        sync: cost of a synchronisation in draft steps. None: measured; the first synchronisations alternate between one
            and two tokens, which gives both costs.
    """

    fixed: int | None
    sync: float | None = None
    _fastest: dict[int, float] = field(default_factory=dict)
    _syncs: int = 0
    _runs: int = 0
    _kept: int = 0

    def next(self, whole: int = 0) -> int:
        """Number of tokens to draft before the next host synchronisation.

        Args:
            whole: number that no run exceeds, where the target's pass is launched behind such a run without another
                synchronisation; 0: it is not.
        """
        if self.fixed is not None:
            return self.fixed
        goes_on = (self._kept + 1) / (self._kept + self._runs + 2)
        if self.sync is not None:
            best = best_ahead(self.sync, 1.0, goes_on)
            return whole if 0 < whole <= min(MOST, _run_s(best, self.sync, 1.0, goes_on)) else best
        if self._syncs < _TRIALS or not {1, 2} <= self._fastest.keys():
            return 1 + self._syncs % 2
        step_s = max(self._fastest[2] - self._fastest[1], 1e-9)
        sync_s = max(self._fastest[1] - step_s, 0.0)
        return best_ahead(sync_s, step_s, goes_on)

    def synchronised(self, steps: int, seconds: float) -> None:
        """Record the time of one synchronisation; the minimum counts, as other processes may delay it."""
        self._syncs += 1
        self._fastest[steps] = min(seconds, self._fastest.get(steps, inf))

    def ended(self, kept: int) -> None:
        """Record the end of a draft run, ``kept`` of whose tokens were followed by another one."""
        self._runs += 1
        self._kept += max(0, kept)
