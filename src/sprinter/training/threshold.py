"""Which τ a gate is used at: what decoding at a threshold is expected to cost, and the threshold for a drift.

Labelled positions stand for those that the draft is asked at. There a token whose score is at least τ is trusted and
drifts by 1 − β = TV(p, q); any other is checked by a target call, does not drift, and with chance β is followed by a
bonus token that neither drifts nor is drafted. With s the share trusted, over n positions:

    tokens a position  1 + b,  b = mean of β where not trusted, 0 where trusted
    drift a token      mean of (1 − β where trusted) / (1 + b)
    calls a token      (1 − s) / (1 + b)

The cap on a run is left out: it asks the target a little more often, and so drifts a little less.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sprinter.decode.checks import between
from sprinter.decode.threshold import reaches

__all__ = ["TauSetting", "choose", "setting"]

_DECIMALS = 10_000
"""A chosen τ has four decimals: it is read and typed by people."""


@dataclass(frozen=True, slots=True)
class TauSetting:
    """What a gate is expected to do at a threshold.

    Attributes:
        tau: the threshold.
        trusted: share of drafted tokens that score at least τ.
        drift: mean TV(π, p) a new token, counting those that were not trusted as 0.
        calls_per_token: target calls a new token.
    """

    tau: float
    trusted: float
    drift: float
    calls_per_token: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def setting(tau: float, scores: Tensor, overlap: Tensor) -> TauSetting:
    """What to expect at τ.

    Args:
        scores: of the gate, ``[n]``. overlap: β at the same positions, ``[n]``.
    """
    trusted, beta = reaches(scores, tau), overlap.double().clamp(0, 1)
    share = float(trusted.double().mean())
    tokens = 1 + float((beta * ~trusted).mean())
    return TauSetting(tau, share, float(((1 - beta) * trusted).mean()) / tokens, (1 - share) / tokens)


def choose(drift: float, scores: Tensor, overlap: Tensor) -> float:
    """The lowest τ, in steps of 0.0001, whose expected drift is at most ``drift``; 0 if trusting all keeps to it.

    Where not even the highest scores may be trusted it is 1, which trusts a score of exactly 1 alone.

    Args:
        drift: in [0, 1]. scores, overlap: as of ``setting``.

    Raises:
        UserError: a drift out of range.
    """
    between("drift", drift, 0.0, 1.0)
    order = scores.argsort(descending=True)
    ranked, beta = scores[order].double(), overlap[order].double().clamp(0, 1)
    left_over = beta.sum() - beta.cumsum(0)
    expected = (1 - beta).cumsum(0) / (len(beta) + left_over)
    over = (expected > drift).nonzero()  # it only grows with the tokens trusted
    if not len(over):
        return 0.0
    refused = float(ranked[over[0]])  # the highest score that must not be trusted
    # a hundredth of a step: a score such as 0.94 is a little less in float32
    return min(1.0, (math.floor(refused * _DECIMALS + 0.01) + 1) / _DECIMALS)
