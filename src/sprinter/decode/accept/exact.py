"""Exact acceptance: Leviathan et al. 2023, Chen et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, at_tokens, chances
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual

__all__ = ["Exact"]


@ACCEPT.rule("exact")
@dataclass(frozen=True, slots=True)
class Exact(AcceptRule):
    """b = min(1, p/q), r = [p − q]₊ (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023, Algorithm 2): π = p."""

    lossless: ClassVar[bool] = True  # π = p for all p and q (Leviathan et al., Appendix A.1)

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, p/q)."""
        return chances(p, q)

    def keep_tokens(
        self, tokens: Sequence[int], p: Tensor, laws: Sequence[Tensor], control: Control | None = None
    ) -> Tensor:
        """b at the draft tokens, from their probabilities alone."""
        if type(self).keep is not Exact.keep:  # a subclass has a rule of its own
            return AcceptRule.keep_tokens(self, tokens, p, laws, control)
        if p.device.type == "cpu":  # numpy's calls cost a fraction of torch's
            own = p.numpy()
            masses = [(own[i, x], laws[i].numpy()[x]) for i, x in enumerate(tokens)]
            return torch.from_numpy(np.array([1 if a >= b else a / b for a, b in masses], own.dtype))
        q_of = torch.stack([law[x] for law, x in zip(laws, tokens, strict=True)])
        return chances(at_tokens(p, tokens), q_of)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [p − q]₊, normalised."""
        return residual(p, q)

    def _replacement_at(self, i: int, p: Tensor, laws: Sequence[Tensor], control: Control | None) -> Tensor:
        if type(self).replacement is not Exact.replacement or p.device.type != "cpu":
            return AcceptRule._replacement_at(self, i, p, laws, control)
        own = p[i].numpy()
        excess = np.maximum(own - laws[i].numpy(), 0)
        total = excess.sum()
        return torch.from_numpy(excess / total) if total > 0 else p[i]
