"""Exact speculative decoding with fixed drafts and independent acceptances (Leviathan et al. 2023, section 3).

α is the mean overlap E[Σ min(p, q)], γ the draft length, c the duration of a draft step over that of a target pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sprinter.decode.checks import at_least
from sprinter.theory.numbers import Number, as_tensor, chance, geometric, non_negative

__all__ = ["best_gamma", "expected_tokens", "speculative_speed_up"]


def expected_tokens(alpha: Number, gamma: Number) -> Tensor:
    """Equation 1: tokens per round, (1 − α^(γ+1))/(1 − α), bonus included; γ + 1 at α = 1; γ may be infinite."""
    return 1 + geometric(chance("alpha", alpha), non_negative("gamma", gamma))


def speculative_speed_up(alpha: Number, gamma: Number, cost: Number) -> Tensor:
    """Theorem 3.8: speed relative to plain decoding, E[tokens] / (γc + 1); 1 at γ = 0."""
    return expected_tokens(alpha, gamma) / (as_tensor(gamma) * non_negative("cost", cost) + 1)


def best_gamma(alpha: float, cost: float, most: int = 100) -> int:
    """The γ in 0 ... ``most`` with the largest speed-up; 0 means that plain decoding is faster than any draft."""
    at_least("most", most, 0)
    return int(speculative_speed_up(alpha, torch.arange(most + 1), cost).argmax())
