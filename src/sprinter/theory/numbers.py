"""Arguments and sums that the theorems share."""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.errors import UserError

__all__ = ["Number", "as_tensor", "chance", "geometric", "non_negative"]

Number = float | int | Tensor
"""A plain number or a tensor of any shape; functions broadcast."""


def as_tensor(value: Number) -> Tensor:
    """Convert to a float64 tensor."""
    return torch.as_tensor(value, dtype=torch.float64)


def chance(name: str, value: Number) -> Tensor:
    """Convert to float64 and clamp rounding errors.

    Raises:
        UserError: an entry is not in [0, 1]; gives the name.
    """
    tensor = as_tensor(value)
    if not bool(((tensor >= -1e-9) & (tensor <= 1 + 1e-9)).all()):
        raise UserError(f"{name} is out of range: give a number in [0, 1]")
    return tensor.clamp(0, 1)


def non_negative(name: str, value: Number) -> Tensor:
    """Convert to float64.

    Raises:
        UserError: an entry is negative (infinity is allowed); gives the name.
    """
    tensor = as_tensor(value)
    if not bool((tensor >= 0).all()):
        raise UserError(f"{name} is out of range: give a number of at least 0")
    return tensor


def geometric(ratio: Tensor, terms: Tensor) -> Tensor:
    """ratio + ratio² + ... + ratio^terms, for ratio in [0, 1] and terms in [0, ∞]; exact limits at ratio 0 and 1."""
    below = ratio.clamp(min=1e-300, max=1 - 1e-16)  # avoids NaN where the limit is taken below
    inner = below * -torch.expm1(terms * torch.log(below)) / (1 - below)
    inner = torch.where(terms == 0, torch.zeros_like(inner), inner)
    return torch.where(ratio == 1, terms, torch.where(ratio == 0, torch.zeros_like(inner), inner))
