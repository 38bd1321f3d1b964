"""ASD: tokens that the target scores nearly as high as its first choice stay, within an account of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import Ends, Judge, LengthRule, TargetCall, Verdict, at_tokens, control_of
from sprinter.decode.checks import count, number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import one_hot

__all__ = ["Asd"]


@ACCEPT.rule("asd")
@dataclass(frozen=True, slots=True)
class Asd(LengthRule):
    """Approximate Speculative Decoding (arXiv 2608.03447): greedy acceptance that lets some mismatches pass.

    The regret of x is max z - z(x) over the target's logits, which is ln of max p / p(x) at temperature 1. A token that
    is not the target's first choice is a mismatch. Of K draft tokens, counted from 0, mismatch i stays if its regret is
    at most ``share`` times K - i, if the draft has at most ``most`` so far, and if the regrets of the text's draft
    tokens sum to at most ``total``. The target's first choice replaces the first that does not stay.

    Args:
        total: the regret that a text may have, in nats; 0: greedy acceptance.
        share: largest regret for each token of the draft from this one on, in nats.
        most: number of mismatches that one draft may have.
    """

    total: float = number(8.0, 0.0, math.inf)
    share: float = number(0.25, 0.0, math.inf)
    most: int = count(2, 0)
    needs_raw: ClassVar[bool] = True

    @property
    def lossless_greedy(self) -> bool:
        """Whether no mismatch may stay."""
        return self.total == 0 or self.most == 0

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """A draft has one end, before the first token that may not stay."""
        n = len(tokens)
        regrets = _regrets(tokens, p, control)
        missed = [x != best for x, best in zip(tokens, p[:n].argmax(-1).tolist(), strict=True)]
        kept, spent, misses = 0, 0.0, 0
        for i, (regret, miss) in enumerate(zip(regrets, missed, strict=True)):
            if miss:
                spent, misses = spent + regret, misses + 1
                allowed = misses <= self.most and spent <= self.total and regret <= self.share * (n - i)
                if self.total == 0 or math.isinf(regret) or not allowed:
                    break
            kept += 1
        ending = torch.zeros(n + 1, dtype=torch.float64)
        ending[kept] = 1.0
        return ending, lambda k: p[n] if k == n else one_hot(p[k])

    def after(self, call: TargetCall, verdict: Verdict) -> Judge:
        """The rule with what is left of the text's regret."""
        n, kept = len(call.tree.tokens), verdict.accepted
        if kept == 0:
            return self
        best = call.p[:n].argmax(-1).tolist()
        regrets = _regrets(call.tree.tokens, call.p, control_of(call, n + 1))
        spent = sum(
            regret
            for i, regret in enumerate(regrets[:kept])
            if call.tree.tokens[i] != best[i] and not any(verdict.trusted[i : i + 1])
        )
        return replace(self, total=max(0.0, self.total - spent)) if spent else self


def _regrets(tokens: Sequence[int], p: Tensor, control: Control | None) -> list[float]:
    """ln of max p / p(x) of the raw laws at each draft token."""
    laws = (p if control is None else control.p)[: len(tokens)]
    found: list[float] = (laws.amax(-1).log() - at_tokens(laws, tokens).log()).tolist()
    return found
