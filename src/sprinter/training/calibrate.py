"""Fit a calibration, so that a score is a probability: temperature scaling, or an isotonic curve."""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.errors import did_you_mean
from sprinter.heads.calibration import CALIBRATIONS, Calibration, Isotonic, Temperature

__all__ = ["fit_calibration", "fit_isotonic", "fit_temperature", "pool_adjacent_violators"]

_KNOTS = 100
"""Number of bins that the isotonic curve is fitted to: fitting single positions would overfit."""
_LARGEST_SLOPE = 1e4


def fit_calibration(kind: str, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Calibration:
    """Fit on held-out positions.

    Args:
        kind: "none", "temperature" or "isotonic".
        logits: ``[n]``, the network's output.
        labels: ``[n]``, 0, 1 or soft.
        weights: ``[n]``, weights of the positions; None: all equal.

    Raises:
        UserError: unknown kind.
    """
    if kind not in CALIBRATIONS:
        raise did_you_mean("calibration", kind, CALIBRATIONS)
    flat = any(float(values.max()) == float(values.min()) for values in (logits, labels))
    if kind == "none" or flat:  # one score or one label: nothing to fit
        return Calibration()
    weight = torch.ones_like(logits) if weights is None else weights
    fit = fit_isotonic if kind == "isotonic" else fit_temperature
    return fit(logits.double(), labels.double(), weight.double())


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor) -> Calibration:
    """Minimise the log loss of sigmoid(logit / temperature + shift) by Newton's method (two unknowns, convex).

    Logits that carry no information, or that are anti-correlated with the labels, would need a slope that is not
    positive; then only the shift is fitted.
    """
    design = torch.stack([logits, torch.ones_like(logits)], 1)
    answer = _newton(design, labels, weights, torch.tensor([1.0, 0.0], dtype=torch.float64))
    if not 1 / _LARGEST_SLOPE < float(answer[0]) < _LARGEST_SLOPE:
        moved = labels.mul(weights).sum() / weights.sum()
        return Temperature(1.0, float(moved.logit(1e-6) - logits.mul(weights).sum() / weights.sum()))
    return Temperature(1 / float(answer[0]), float(answer[1]))


def _newton(design: Tensor, labels: Tensor, weights: Tensor, start: Tensor) -> Tensor:
    """Coefficients ``[k]`` of a weighted logistic regression; a step is halved until the loss decreases."""

    def loss(at: Tensor) -> Tensor:
        logit = design @ at
        return (weights * (torch.nn.functional.softplus(logit) - labels * logit)).sum()

    ridge = 1e-9 * weights.sum() * torch.eye(design.shape[1], dtype=torch.float64)
    at, now = start, loss(start)
    for _ in range(50):
        score = torch.sigmoid(design @ at)
        slope = design.T @ (weights * (score - labels))
        curve = design.T @ (design * (weights * score * (1 - score)).unsqueeze(1)) + ridge
        step = torch.linalg.solve(curve, slope)
        scale = 1.0
        while scale > 1e-6 and not loss(at - scale * step) <= now:
            scale /= 2
        if scale <= 1e-6:
            break
        at = at - scale * step
        now = loss(at)
        if float((scale * step).abs().max()) < 1e-10:
            break
    return at


def fit_isotonic(logits: Tensor, labels: Tensor, weights: Tensor) -> Calibration:
    """Isotonic regression (least squares) on the means of bins that hold equal numbers of positions."""
    order = logits.argsort()
    bins = min(_KNOTS, max(2, len(logits) // 20))
    parts = [part for part in order.tensor_split(bins) if len(part) and float(weights[part].sum()) > 0]
    weight = torch.stack([weights[part].sum() for part in parts])
    centre, height = (
        torch.stack([(weights[part] * values[part]).sum() for part in parts]) / weight
        for values in (logits, labels)
    )
    # bins with equal logits are merged into one knot, in float32, as the head computes
    knots, place = torch.unique(centre.float(), return_inverse=True)
    mass = torch.zeros(len(knots), dtype=torch.float64).index_add_(0, place, weight)
    mean = torch.zeros(len(knots), dtype=torch.float64).index_add_(0, place, weight * height) / mass
    if len(knots) < 2:
        return Calibration()
    return Isotonic(knots, pool_adjacent_violators(mean, mass).clamp(0, 1))


def pool_adjacent_violators(values: Tensor, weights: Tensor) -> Tensor:
    """The non-decreasing sequence nearest to ``values`` in weighted least squares, ``[k]`` (Ayer et al. 1955)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of values
    for mean, mass in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while blocks and blocks[-1][0] >= mean:
            other, other_mass, other_size = blocks.pop()
            mean = (mean * mass + other * other_mass) / (mass + other_mass)
            mass, size = mass + other_mass, size + other_size
        blocks.append((mean, mass, size))
    return torch.tensor([mean for mean, _, size in blocks for _ in range(size)], dtype=values.dtype)
