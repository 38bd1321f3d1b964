"""Seconds of a pair's forward passes, as the engine runs them, and the speed that a replay then stands for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from sprinter.decode.costs import PassCosts
from sprinter.engine.backends.base import DraftPlan, PassInput
from sprinter.engine.costs import borrow, draft_input, read_prompts, run_interleaved, target_input
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.theory.replay import Replay

__all__ = ["LONGEST", "PassTimes", "measure_passes"]

LONGEST = 9
"""Tokens of the longest target pass that is timed: a draft of 8 and the token before it."""


@dataclass(frozen=True)
class PassTimes:
    """Seconds of single forward passes.

    Attributes:
        target_s: of a target pass over n tokens, by n from 1.
        draft_s: of a draft step: forward pass, law, draw, entropy, and the gate if the pair has one.
        gate_s: of the gate, within ``draft_s``.
    """

    target_s: dict[int, float]
    draft_s: float
    gate_s: float = 0.0

    def pass_s(self, tokens: float) -> float:
        """Seconds of a target pass over a mean number of tokens, >= 1; beyond the longest, along the last slope."""
        return PassCosts(tuple(sorted(self.target_s.items()))).target_s(tokens)

    def token_s(self, run: Replay) -> float:
        """Seconds of both models per new token of a replay."""
        drafted = run.draft_steps * self.draft_s
        asked = run.target_calls * self.pass_s(run.read / run.target_calls) if run.target_calls else 0.0
        return (drafted + asked) / run.tokens

    @property
    def optimal(self) -> str:
        """The method ``optimal`` with these costs: a draft step, and each further token of a target pass."""
        return f"optimal({self._costs})"

    @property
    def auto(self) -> str:
        """The parameters of ``auto`` with these costs: those of ``optimal``, and of passes over several tokens."""
        return f"{self._costs}, reads={PassCosts(tuple(sorted(self.target_s.items()))).reads}"

    @property
    def _costs(self) -> str:
        one, most = self.pass_s(1), max(self.target_s)
        token = max(0.0, self.pass_s(most) / one - 1) / max(1, most - 1)
        return f"step={self.draft_s / one:.2g}, token={token:.2g}"

    def speed_up(self, run: Replay) -> float:
        """Speed of a replay relative to plain decoding with the target."""
        return self.target_s[1] / self.token_s(run)


def measure_passes(
    pair: Pair,
    *,
    context: int = 256,
    longest: int = LONGEST,
    repeats: int = 7,
    sampling: Sampling = Sampling(),
    progress: Callable[[int, int], None] | None = None,
) -> PassTimes:
    """Medians of interleaved repeats: one pass of each length and one draft step a repeat, after a warm-up.

    Args:
        context: tokens before the pass; fewer if the models' context is shorter.

    Raises:
        UserError: the pair has no draft. SprinterError: a model fails.
    """
    if pair.models.draft is None:
        raise UserError("a probe times both models, and this pair has no draft: give draft=...")
    context = max(1, min(context, pair.models.context - longest))
    models = borrow(pair.models, context + longest)
    ids = read_prompts(models, context, longest)
    jobs: dict[int, PassInput] = {n: target_input(ids, context, n, sampling) for n in range(1, longest + 1)}
    jobs[0] = draft_input(ids, context, 1, DraftPlan(sampling, ("entropy",), {}))
    if pair.gate is not None:
        jobs[-1] = draft_input(ids, context, 1, DraftPlan(sampling, ("entropy",), {"gate": pair.gate}))
    medians = {n: median(each) for n, each in run_interleaved(models, jobs, repeats, progress).items()}
    draft_s, bare = medians.get(-1, medians[0]), medians[0]
    return PassTimes(
        {n: seconds for n, seconds in medians.items() if n > 0}, draft_s, max(0.0, draft_s - bare)
    )
