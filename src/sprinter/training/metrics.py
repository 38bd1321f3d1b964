"""Metrics of scores: ROC and precision-recall, calibration, rates at thresholds, with bootstrap intervals by prompt.

Labels may be soft. A position with label y then counts as y of a positive and 1 − y of a negative, so every curve is
the expectation over hard labels drawn with probability y.

Positions of one text are correlated, so the bootstrap resamples prompts, not positions (a cluster bootstrap with
percentile intervals): resampling positions would make the intervals too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.threshold import reaches

__all__ = [
    "Bootstrap", "Curve", "Curves", "Interval", "as_json", "auc", "calibration_curve", "calibration_error", "curves",
    "mean_interval", "rates",
]  # fmt: skip

LEVEL = 0.95
"""Confidence level of every interval."""
GRID = 101
"""Number of points of a curve."""
_GRID = torch.linspace(0, 1, GRID, dtype=torch.float64)
_STEPS = 512
"""Thresholds (quantiles) of the curves of a bootstrap draw; the estimate itself uses every score as a threshold."""


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low) or math.isnan(self.high):
            return f"{self.value:.3f} (n=1)"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def to_list(self) -> list[float | None]:
        """[value, low, high], with None for NaN."""
        return [None if math.isnan(value) else value for value in self]


@dataclass(frozen=True, slots=True)
class Curve:
    """y over x at ``GRID`` points, with the pointwise 95 % band; all ``[GRID]``."""

    x: Tensor
    y: Tensor
    low: Tensor
    high: Tensor

    def tail(self, start: float = 0.03) -> Curve:
        """The curve from ``x = start`` on: precision at the smallest recalls depends on a handful of positions."""
        kept = self.x >= start
        return Curve(*(getattr(self, name)[kept] for name in ("x", "y", "low", "high")))


class Curves(NamedTuple):
    """ROC (true over false positive rate) and precision over recall, with the areas under them."""

    auc: Interval
    average_precision: Interval
    roc: Curve
    precision_recall: Curve


def as_json(value: Any) -> Any:
    """What was measured, as JSON values: NaN as None, an interval as [value, low, high], curves with four decimals."""
    if isinstance(value, Interval):
        return value.to_list()
    if isinstance(value, Tensor):
        return [None if math.isnan(one) else round(one, 4) for one in value.tolist()]
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {name: as_json(one) for name, one in value.items()}
    return [as_json(one) for one in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Bootstrap draws of prompts.

    Attributes:
        group: ``[n]`` int64, the prompt of each position, from 0.
        counts: ``[repeats, prompts]`` float32, how often each prompt is drawn.
    """

    group: Tensor
    counts: Tensor

    @classmethod
    def make(cls, group: Tensor, repeats: int = 500, seed: int = 0) -> Bootstrap:
        """Draw as many prompts as there are, with replacement, ``repeats`` times.

        With a single prompt nothing is drawn and intervals are NaN: one prompt does not show the variance.
        """
        _, group = torch.unique(group, return_inverse=True)
        prompts = int(group.max()) + 1 if len(group) else 0
        chance = torch.Generator().manual_seed(seed)
        picks = torch.randint(max(prompts, 1), (repeats, prompts), generator=chance)
        counts = torch.zeros(repeats, prompts).scatter_add_(1, picks, torch.ones(repeats, prompts))
        counts *= prompts > 1
        return cls(group, counts)

    def sums(self, values: Tensor) -> Tensor:
        """Sum of ``values [n, k]`` over the positions of every draw: ``[repeats, k]`` float64."""
        by_prompt = torch.zeros(self.counts.shape[1], values.shape[1], dtype=torch.float64)
        by_prompt.index_add_(0, self.group, values.double())
        return self.counts.double() @ by_prompt


def auc(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float:
    """Area under the ROC curve: P(a positive scores above a negative), ties count half. NaN with one class only.

    Args:
        scores, labels: ``[n]``; labels are 0, 1 or soft.
        weights: ``[n]``, weights of the positions; None: all equal.
    """
    weight = torch.ones_like(scores, dtype=torch.float64) if weights is None else weights.double()
    return float(_area(*_exact_rates(scores, labels.double(), weight)[:2]))


def curves(scores: Tensor, labels: Tensor, bootstrap: Bootstrap) -> Curves:
    """ROC and precision-recall curves and the areas under them, with intervals. NaN with one class only.

    Args:
        scores, labels: ``[n]``; labels are 0, 1 or soft.
        bootstrap: draws of prompts.
    """
    truth = labels.double()
    true, false, precision = _exact_rates(scores, truth, torch.ones_like(truth))
    place, bins = _bins(-scores, _STEPS)
    drawn = torch.cat(
        [torch.ones_like(bootstrap.counts[:1]), bootstrap.counts]
    )  # the data itself comes first
    parts = [
        _histograms(bootstrap.group, drawn, place, bins, share).cumsum(1) for share in (truth, 1 - truth)
    ]
    areas, averages, rocs, recalls = _shape(*_as_rates(*parts))
    return Curves(
        _interval(_area(true, false), areas[1:]),
        _interval(_average(true, precision), averages[1:]),
        Curve(_GRID, rocs[0], *_band(rocs[1:])),
        Curve(_GRID, recalls[0], *_band(recalls[1:])),
    )


def rates(scores: Tensor, labels: Tensor, taus: Tensor, bootstrap: Bootstrap) -> tuple[Curve, Curve]:
    """η_TP and η_FP: the shares of positives and of negatives that score at least τ, for each of ``taus [k]``."""
    kept = reaches(scores.unsqueeze(1), taus).double()
    found = []
    for weight in (labels.double(), 1 - labels.double()):
        values = torch.cat([kept * weight.unsqueeze(1), weight.unsqueeze(1)], 1)
        whole, draws = values.sum(0), bootstrap.sums(values)
        found.append(Curve(taus, whole[:-1] / whole[-1], *_band(draws[:, :-1] / draws[:, -1:])))
    return found[0], found[1]


def mean_interval(values: Tensor, weights: Tensor, bootstrap: Bootstrap) -> Interval:
    """Weighted mean of ``[n]`` values, with its interval; NaN if no position has weight."""
    both = torch.stack([values.double() * weights.double(), weights.double()], 1)
    whole, draws = both.sum(0), bootstrap.sums(both)
    return _interval((whole[:1] / whole[1:]), draws[:, 0] / draws[:, 1])


def calibration_curve(scores: Tensor, labels: Tensor, bootstrap: Bootstrap, bins: int = 10) -> Curve:
    """Mean label over mean score in bins of equal numbers of positions, ``[bins]`` (fewer where scores tie)."""
    place, count = _bins(scores, bins)
    inside = torch.nn.functional.one_hot(place, count).double()
    values = torch.cat(
        [inside, inside * scores.double().unsqueeze(1), inside * labels.double().unsqueeze(1)], 1
    )
    (size, score, label), draws = values.sum(0).chunk(3), bootstrap.sums(values).chunk(3, 1)
    return Curve(score / size, label / size, *_band(draws[2] / draws[0]))


def calibration_error(scores: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: the mean of |mean label − mean score| over bins of equal numbers of positions."""
    place, count = _bins(scores, bins)
    gap = torch.zeros(count, dtype=torch.float64).index_add_(0, place, labels.double() - scores.double())
    return float(gap.abs().sum() / len(scores))


def _bins(scores: Tensor, bins: int) -> tuple[Tensor, int]:
    """Bin of each position ``[n]``, and the number of bins; equal scores share a bin."""
    ranked = scores.sort().values
    edges = torch.unique(ranked[torch.arange(1, bins) * len(scores) // bins])
    place = torch.bucketize(scores, edges, right=True)
    used, place = torch.unique(place, return_inverse=True)
    return place, len(used)


def _histograms(group: Tensor, counts: Tensor, place: Tensor, bins: int, weight: Tensor) -> Tensor:
    """Sum of ``weight [n]`` in each bin (``place [n]``) for every draw: ``[repeats, bins]`` float64."""
    by_prompt = torch.zeros(counts.shape[1] * bins).index_add_(0, group * bins + place, weight.float())
    return (counts @ by_prompt.view(-1, bins)).double()


def _shape(true: Tensor, false: Tensor, precision: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """AUC and average precision ``[r]``, ROC and precision at the grid's points ``[r, GRID]``, of each draw."""
    curves = _at(_GRID, false, true), _step(_GRID, true, precision)
    return _area(true, false), _average(true, precision), *curves


def _average(true: Tensor, precision: Tensor) -> Tensor:
    return (true.diff(dim=1) * precision[:, 1:]).sum(1)


def _exact_rates(scores: Tensor, truth: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rates and precision ``[1, k + 1]`` with every distinct score as a threshold."""
    order = scores.argsort(descending=True)
    last = torch.ones(len(scores), dtype=torch.bool)
    last[:-1] = scores[order].diff() != 0  # only the last of equal scores is a threshold
    parts = [(weight * share)[order].cumsum(0)[last].unsqueeze(0) for share in (truth, 1 - truth)]
    return _as_rates(*parts)


def _as_rates(hits: Tensor, misses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """True and false positive rate and precision ``[r, k + 1]``, from weights cumulated from the highest threshold."""
    precision = hits / (hits + misses).clamp(min=1e-12)
    rates = [torch.nn.functional.pad(summed / summed[:, -1:], (1, 0)) for summed in (hits, misses)]
    return rates[0], rates[1], torch.cat([precision[:, :1], precision], 1)


def _area(true: Tensor, false: Tensor) -> Tensor:
    return torch.trapezoid(true, false, dim=1)


def _at(grid: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """y at the grid's points by linear interpolation: ``[r, GRID]``."""
    wanted = grid.expand(len(x), -1).contiguous()
    right = torch.searchsorted(x.contiguous(), wanted, right=True).clamp(1, x.shape[1] - 1)
    x0, x1, y0, y1 = (v.gather(1, i) for v in (x, y) for i in (right - 1, right))
    return torch.lerp(y0, y1, ((wanted - x0) / (x1 - x0).clamp(min=1e-12)).clamp(0, 1))


def _step(grid: Tensor, recall: Tensor, precision: Tensor) -> Tensor:
    """Precision at the first threshold that reaches a recall; interpolation would overestimate it."""
    wanted = grid.expand(len(recall), -1).contiguous()
    reached = torch.searchsorted(recall.contiguous(), wanted - 1e-12).clamp(1, recall.shape[1] - 1)
    return precision.gather(1, reached)


def _band(draws: Tensor) -> tuple[Tensor, Tensor]:
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=draws.dtype)
    low, high = torch.nanquantile(draws, tails, dim=0)
    return low, high


def _interval(own: Tensor, draws: Tensor) -> Interval:
    low, high = _band(draws.reshape(-1, 1))
    return Interval(float(own), float(low), float(high))
