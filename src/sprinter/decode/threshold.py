"""The one way in which a head's score meets its threshold, in decoding and in what is told of it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reaches"]


def reaches(scores: Tensor, tau: float | Tensor) -> Tensor:
    """score >= τ, in float32, in which heads score.

    So a score of 0.7 reaches τ = 0.7, which is a little less in float32, whatever dtype the score is handed over in.

    Args:
        scores, tau: shapes that broadcast.
    """
    return scores.float() >= torch.as_tensor(tau, dtype=torch.float32, device=scores.device)
