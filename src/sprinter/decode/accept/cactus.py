"""Cactus: acceptance with a slack in KL around the drafted token, as published (ICLR 2026)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import Ends, LengthRule, at_tokens, ends_of
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual, wide

__all__ = ["Cactus"]


@ACCEPT.rule("cactus")
@dataclass(frozen=True, slots=True)
class Cactus(LengthRule):
    """Keeps x with probability min(1, h/q(x)), h = min(1, p(x) + sqrt(2 delta p(x) (1 - p(x)))) (Cactus, ICLR 2026).

    A refused x is replaced by a draw from [H - q]_+, normalised, where H is p with the probability of x raised to h and
    the others scaled down. As H depends on the drafted token, the law of the replacement does: the law of a text is
    stated for whole chains, and the published bound KL <= delta does not hold for the law of a position.

    Args:
        delta: slack, nats.
    """

    delta: float = number(0.1, 0.0, 100.0)
    lossless_greedy: ClassVar[bool] = True  # at temperature 0 p(x) is 0 or 1, and h = p

    @property
    def lossless(self) -> bool:
        """Whether delta is 0: h = p, the exact rule."""
        return self.delta == 0

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """How many tokens stay, and what follows them."""
        n = len(tokens)
        p_of, q_of = wide(at_tokens(p[:n], tokens)), wide(at_tokens(q, tokens))
        raised = (p_of + (2 * self.delta * p_of * (1 - p_of)).sqrt()).clamp(max=1)

        def law_after(k: int) -> Tensor:
            if k == n:
                return p[n]
            others = (1 - raised[k]) / (1 - p_of[k]) if p_of[k] < 1 else torch.zeros_like(p_of[k])
            wanted = p[k] * others.to(p)
            wanted[tokens[k]] = raised[k].to(p)
            return residual(wanted, q[k])

        return ends_of((raised / q_of).clamp(max=1)), law_after
