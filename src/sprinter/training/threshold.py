"""Choose a gate's threshold τ: the expected cost of decoding at a threshold, and the lowest threshold for a drift.

Labelled positions are taken as a sample of the positions where the draft is asked. There a token whose score is at
least τ is trusted and drifts by 1 − β = TV(p, q). Any other token is checked by a target call, does not drift, and with
probability β is followed by a bonus token, which is not drafted and does not drift. With s the share trusted, over n
positions:

    tokens per position  1 + b,  b = mean of β where not trusted, 0 where trusted
    drift per token      mean of (1 − β where trusted) / (1 + b)
    calls per token      (1 − s) / (1 + b)

The cap on a run is ignored: with it there are a few more target calls and a little less drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sprinter.decode.checks import between
from sprinter.decode.threshold import reaches

__all__ = ["TauSetting", "choose", "setting"]

_DECIMALS = 10_000
"""A chosen τ is rounded to four decimals, because people read and type it."""


@dataclass(frozen=True, slots=True)
class TauSetting:
    """Expected behaviour of a gate at a threshold.

    Attributes:
        tau: the threshold.
        trusted: share of drafted tokens that score at least τ.
        drift: mean TV(π, p) per new token, 0 for tokens that are not trusted.
        calls_per_token: target calls per new token.
    """

    tau: float
    trusted: float
    drift: float
    calls_per_token: float


def setting(tau: float, scores: Tensor, overlap: Tensor) -> TauSetting:
    """Expected behaviour at τ.

    Args:
        tau: the threshold.
        scores: the gate's scores, ``[n]``.
        overlap: β at the same positions, ``[n]``.
    """
    trusted, beta = reaches(scores, tau), overlap.double().clamp(0, 1)
    share = float(trusted.double().mean())
    tokens = 1 + float((beta * ~trusted).mean())
    return TauSetting(tau, share, float(((1 - beta) * trusted).mean()) / tokens, (1 - share) / tokens)


def choose(drift: float, scores: Tensor, overlap: Tensor) -> float:
    """The lowest τ, in steps of 0.0001, whose expected drift is at most ``drift``; 0 if all tokens may be trusted.

    If not even the highest scores may be trusted, τ is 1, which trusts only a score of exactly 1.

    Args:
        drift: maximum mean drift, in [0, 1].
        scores, overlap: as for ``setting``.

    Raises:
        UserError: ``drift`` is out of range.
    """
    between("drift", drift, 0.0, 1.0)
    order = scores.argsort(descending=True)
    ranked, beta = scores[order].double(), overlap[order].double().clamp(0, 1)
    left_over = beta.sum() - beta.cumsum(0)
    expected = (1 - beta).cumsum(0) / (len(beta) + left_over)
    over = (expected > drift).nonzero()  # the drift is monotone in the number of trusted tokens
    if not len(over):
        return 0.0
    refused = float(ranked[over[0]])  # the highest score that must not be trusted
    # add a hundredth of a step: in float32 a score such as 0.94 is slightly smaller
    return min(1.0, (math.floor(refused * _DECIMALS + 0.01) + 1) / _DECIMALS)
