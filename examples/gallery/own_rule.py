"""Your own rule: acceptance with a minimum probability, checked, then its dial drawn."""

from __future__ import annotations

from dataclasses import dataclass

import draw
from torch import Tensor

import sprinter
from sprinter.decode import ACCEPT, AcceptRule, Control, check_accept, number
from sprinter.laws import residual


@ACCEPT.rule("kind")
@dataclass(frozen=True, slots=True)
class Kind(AcceptRule):
    """Keep x with chance max(least, min(1, p/q)), else draw from [p − q]₊, normalised."""

    least: float = number(0.2, 0.0, 1.0)

    @property
    def lossless(self) -> bool:
        """At least = 0."""
        return self.least == 0

    def keep(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """max(least, min(1, p/q))."""
        return (p / q).nan_to_num(0.0).clamp(min=self.least, max=1.0)

    def replacement(self, p: Tensor, q: Tensor, control: Control | None = None) -> Tensor:
        """[p − q]₊, normalised."""
        return residual(p, q)


check_accept(Kind(), count=200)  # its law is what it says, and lossless where it says so
pair = sprinter.load_pair()
prompts = ["Once upon a time, there was a little", "The old mill stood by", "One morning a small bird"]
points = []
for least in (0, 0.2, 0.4, 0.6, 0.8, 1):
    method = f"stop=fixed(gamma=5),accept=kind(least={least})"
    outs = pair.generate(prompts, method=method, max_new_tokens=48, seed=1)
    drift = sum(out.stats.mean_drift or 0.0 for out in outs) / len(outs)
    points.append((drift, sum(out.stats.target_calls for out in outs) / sum(len(out.tokens) for out in outs)))
draw.chart("own_rule", {"accept=kind, least = 0 to 1": points}, "mean drift", "target calls a token")
