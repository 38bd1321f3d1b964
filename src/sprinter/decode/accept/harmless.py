"""AutoJudge: a head on the target's state decides whether a token that acceptance refuses may stay all the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from sprinter.decode.accept.base import Ends, LengthRule, at_tokens, chances, ends_of
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.decode.threshold import RECORDED, UNRECORDED, reaches
from sprinter.errors import SprinterError
from sprinter.laws import residual, wide

__all__ = ["Harmless"]


@ACCEPT.rule("judge")
@dataclass(frozen=True, slots=True)
class Harmless(LengthRule):
    """A token stays if exact acceptance keeps it or the head calls it harmless (AutoJudge, arXiv 2504.20039).

    The head (kind ``judge``) scores the target's state after x, so that what becomes of x depends on x beyond its
    probability: the rule declares a law of chains. The first token that neither keeps is replaced from [p − q]₊.

    Args:
        threshold: least score of a token that stays, in [0, 1]; "recorded" takes the head's own.
    """

    threshold: float | str = number(RECORDED, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"judge"})

    def settle(self, taus: Mapping[str, float]) -> Harmless:
        """The rule with the head's own threshold in place of "recorded"."""
        settled = isinstance(self.threshold, str) and "judge" in taus
        return replace(self, threshold=taus["judge"]) if settled else self

    def ends(self, tokens: Sequence[int], p: Tensor, q: Tensor, control: Control | None = None) -> Ends:
        """How many tokens stay, and what follows them."""
        if control is None or "judge" not in control.heads:
            raise SprinterError(f"{self} was given no score of a head: give control.heads")
        n, least = len(tokens), UNRECORDED if isinstance(self.threshold, str) else self.threshold
        stay = chances(wide(at_tokens(p[:n], tokens)), wide(at_tokens(q, tokens)))
        stay = torch.where(reaches(control.heads["judge"][1:].to(stay.device), least), 1.0, stay)
        return ends_of(stay), lambda k: p[n] if k == n else residual(p[k], q[k])
