"""Which of plain decoding, exact drafts and trust is fastest, by the cost of a draft step and the overlap.

c is the duration of a draft step over that of a target pass, β the mean overlap Σ min(p, q); acceptances are taken as
independent (Leviathan et al. 2023), drafts of trust and of exact rules both as of one length, up to ``LONGEST_DRAFT``.
A lossy rule keeps some share f of the tokens that an exact one refuses: for its speed that is an overlap of
β' = β + f(1 − β), whichever rule it is; by Theorem 5 of Yin et al. rejections and drift add up to 1 − β at least. At
every length γ, and so for the best ones, it gains at most 1/(1 − f), as (1 − β'^(γ+1)) / (1 − β') is at most
1/(1 − f) times (1 − β^(γ+1)) / (1 − β). A rule whose runs end where exact drafts cannot, by a signal or beyond the
longest draft, gains that too, as does one whose own text has a larger β than the target's: neither is in this model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sprinter.decode.checks import between
from sprinter.theory.numbers import non_negative
from sprinter.theory.speculation import best_gamma, speculative_speed_up

__all__ = ["GAIN", "LONGEST_DRAFT", "Place", "Region", "place"]

Region = Literal["plain", "exact", "trust"]
GAIN = 1.3
"""Least gain of trust over exact drafts that makes its drift worth a thought."""
LONGEST_DRAFT = 15
"""Draft tokens of the longest exact draft that is considered."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pair lies.

    Attributes:
        region: the fastest of plain decoding, exact drafts, and trust if it gains at least ``GAIN``.
        exact: speed of the best exact draft over plain decoding; gamma: its length, 0 where none pays.
        trust: the same if a share of the errors is kept.
        needed: share of the draft's errors that must be kept for a gain of ``GAIN``; None: keeping all is too little.
    """

    region: Region
    exact: float
    gamma: int
    trust: float
    needed: float | None

    @property
    def gain(self) -> float:
        """Speed of trust over that of the best exact draft, or of plain decoding where none pays."""
        return self.trust / self.exact


def place(overlap: float, cost: float, *, kept: float, fixed: float = 0.0) -> Place:
    """Where a pair lies on the map.

    Args:
        overlap: β in [0, 1]. cost: c >= 0.
        kept: f, share of the draft's errors that may stay without harm.
        fixed: further cost of each call, as over a network, in units of a target pass: it makes the draft cheaper.

    Raises:
        UserError: a value out of range.
    """
    between("overlap", overlap, 0, 1)
    between("kept", kept, 0, 1)
    step = float(non_negative("cost", cost) / (1 + non_negative("fixed", fixed)))
    exact, gamma = _best(overlap, step)
    trust, _ = _best(overlap + kept * (1 - overlap), step)
    region: Region = "trust" if trust >= GAIN * exact else "exact" if gamma else "plain"
    return Place(region, exact, gamma, trust, _needed(overlap, step, exact))


def _best(overlap: float, cost: float) -> tuple[float, int]:
    gamma = best_gamma(overlap, cost, LONGEST_DRAFT)
    return float(speculative_speed_up(overlap, gamma, cost)), gamma


def _needed(overlap: float, cost: float, exact: float) -> float | None:
    """Least share of the errors whose keeping gains ``GAIN``, by bisection."""
    if _best(1.0, cost)[0] < GAIN * exact:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        enough = _best(overlap + middle * (1 - overlap), cost)[0] >= GAIN * exact
        low, high = (low, middle) if enough else (middle, high)
    return high
