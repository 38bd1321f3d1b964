"""FLy: a refused token stays if the draft goes on well behind it (as in vLLM)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, Ends, LengthRule, at_tokens
from sprinter.decode.accept.choice import GreedyMatch
from sprinter.decode.accept.exact import Exact
from sprinter.decode.checks import choice, count, number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT

__all__ = ["Fly"]

_BASES: dict[str, AcceptRule] = {"exact": Exact(), "greedy": GreedyMatch()}


@ACCEPT.rule("fly")
@dataclass(frozen=True, slots=True)
class Fly(LengthRule):
    """Keeps a refused token if the target was unsure there and its base rule accepts the tokens that follow (FLy).

    A refused x stays if p(x) > 0, the sum of -p ln p over the k largest p is at least ``entropy``, and the next
    ``window`` draft tokens are accepted. The window lies inside the draft and is at most its length less one.

    Args:
        window: number of tokens behind it that must be accepted.
        entropy: least partial entropy of the target, in nats.
        top: number of probabilities in the partial entropy.
        base: rule that accepts and refuses, "exact" or "greedy".
    """

    window: int = count(6)
    entropy: float = number(0.3, 0.0, math.inf)
    top: int = count(3)
    base: str = choice("exact", "base", _BASES)
    lossless_greedy: ClassVar[bool] = True  # at temperature 0 a refused token has p(x) = 0

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """How many tokens stay, and what follows them."""
        n, base = len(tokens), _BASES[self.base]
        accepted = base.keep_tokens(tokens, p[:n], q.unbind()).tolist()
        forgiven, window = self._forgiven(tokens, p[:n]), min(self.window, n - 1)
        ending = torch.zeros(n + 1, dtype=torch.float64)
        reached = [1.0, *[0.0] * n]  # probability that all before position i stay
        for i, keep in enumerate(accepted):
            ahead = math.prod(accepted[i + 1 : i + 1 + window]) if forgiven[i] and 0 < window < n - i else 0.0
            reached[i + 1] += reached[i] * keep
            if ahead:
                reached[i + 1 + window] += reached[i] * (1 - keep) * ahead
            ending[i] = reached[i] * (1 - keep) * (1 - ahead)
        ending[n] = reached[n]

        def law_after(k: int) -> Tensor:
            return p[n] if k == n else base.replacement(p[k : k + 1], q[k : k + 1])[0]

        return ending, law_after

    def _forgiven(self, tokens: Sequence[int], p: Tensor) -> list[bool]:
        """Whether each draft token may stay although it is refused."""
        most = p.topk(min(self.top, p.shape[-1]), -1).values
        unsure = -torch.special.xlogy(most, most).sum(-1) >= self.entropy
        found: list[bool] = (unsure & (at_tokens(p, tokens) > 0)).tolist()
        return found
