"""OPT and UNO: acceptance with a slack ε (Yin et al. 2024, section 4.2: Theorem 4 and its baseline)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sprinter.decode.accept.base import AcceptRule, chances
from sprinter.decode.checks import number
from sprinter.decode.draft import Control
from sprinter.decode.registry import ACCEPT
from sprinter.laws import residual

__all__ = ["Opt", "Uno"]


@ACCEPT.rule("opt")
@dataclass(frozen=True, slots=True)
class Opt(AcceptRule):
    """b = min(1, (p + ε)/q), r = [A]₊ with A = max(p − q, −ε)/Σ (Yin et al. 2024, Theorem 4).

    [A]₊ is [p − q]₊, normalised, and gives the smallest TV(π, p) for this b: a point on the Pareto front of Theorem 5.

    Args:
        epsilon: slack, in probability.
    """

    epsilon: float = number(0.01, 0.0, 1.0)

    @property
    def lossless(self) -> bool:
        """Whether ε = 0."""
        return self.epsilon == 0

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, (p + ε)/q)."""
        return chances(p + self.epsilon, q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = [p − q]₊, normalised."""
        return residual(p, q)


@ACCEPT.rule("uno")
@dataclass(frozen=True, slots=True)
class Uno(AcceptRule):
    """b as OPT's, r = p (Yin et al. 2024, baseline Decoding-UNO).

    The listing in the paper's Appendix G draws the replacement from the draft's law, the text from the target's. This
    implementation follows the text.

    Args:
        epsilon: slack, in probability.
    """

    epsilon: float = number(0.01, 0.0, 1.0)

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """b = min(1, (p + ε)/q)."""
        return chances(p + self.epsilon, q)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """r = p."""
        return p
