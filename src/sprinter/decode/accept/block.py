"""Block verification: exact acceptance that judges a chain as a whole (Sun et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import Ends, LengthRule, at_tokens
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual, wide

__all__ = ["Block"]


@ACCEPT.rule("block")
@dataclass(frozen=True, slots=True)
class Block(LengthRule):
    """Keeps the longest prefix that passes a test of its own (Sun et al. 2024, arXiv 2403.10444, Algorithm 2).

    With the weights b_0 = 1 and b_i = min(1, b_{i-1} p(x_i)/q(x_i)), and r_i = sum of [b_i p - q]_+ over the laws after
    x_1..x_i, prefix i passes with probability h_i = r_i / (r_i + 1 - b_i), and the whole chain with b_n. After the
    longest prefix that passes, the next token is drawn from [b_i p - q]_+, normalised; after the whole chain, from p.

    The text has the target's law, as under ``exact``, and no round keeps fewer tokens of the same drafts in
    expectation: a token that is more probable under p than under q makes up for an earlier one that is less so.
    """

    lossless: ClassVar[bool] = True  # Sun et al., Theorem 1

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """How many tokens stay, and what follows them; only one residual law is made."""
        n, b = len(tokens), prefix_weights(tokens, p, q)
        weights = b.to(p).unsqueeze(-1)
        left = wide((weights[1:n] * p[1:n] - q[1:]).clamp_(min=0).sum(-1))
        room = left + (1 - b[1:n])
        # 0/0 where b = 1 and p = q next, as at each match of a greedy text: then the next prefix passes too.
        passes = torch.where(room > 0, left / room, 1.0)
        passes = torch.cat([b[:1], passes, b[n:]])
        fails_after = torch.cat([(1 - passes[1:]).flip(0).cumprod(0).flip(0), b[:1]])

        def law_after(k: int) -> Tensor:
            return p[n] if k == n else residual(weights[k] * p[k], q[k])

        return passes * fails_after, law_after


def prefix_weights(tokens: Sequence[int], p: Tensor, q: Tensor) -> Tensor:
    """b_0 = 1, b_i = min(1, b_{i-1} p(x_i)/q(x_i)): ``[n + 1]`` in float64.

    With S_i = sum of ln p(x_j)/q(x_j) up to i this is exp(S_i - max(S_0, ..., S_i)), which a GPU computes at once.
    """
    ratio = wide(at_tokens(p[: len(tokens)], tokens)) / wide(at_tokens(q, tokens))
    sums = torch.nn.functional.pad(ratio.log().cumsum(0), (1, 0))
    return (sums - sums.cummax(0).values).exp()
