"""Comparison of a head's score with its threshold, shared by decoding, training and reports."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["DEFAULT", "RECORDED", "UNRECORDED", "reaches"]

RECORDED = "recorded"
"""Value of a threshold parameter: use the threshold that is recorded in the head."""
DEFAULT = "default"
"""Value of a threshold parameter: the default of the signal that it is compared with."""
UNRECORDED = 0.5
"""Value of "recorded" without a head, in simulations and enumeration."""


def reaches(scores: Tensor, tau: float | Tensor) -> Tensor:
    """Whether score >= τ, compared in float32, the dtype of heads.

    So a score of 0.7 reaches τ = 0.7 although 0.7 is rounded down in float32; the dtype of ``scores`` does not matter.

    Args:
        scores, tau: shapes that broadcast.
    """
    if isinstance(tau, float):  # no tensor of another device, which no graph could hold
        return scores.float() >= float(np.float32(tau))
    return scores.float() >= torch.as_tensor(tau, dtype=torch.float32, device=scores.device)
