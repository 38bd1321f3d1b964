"""Seconds of a pair's forward passes, as the engine runs them, and the speed that a replay then stands for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch

from sprinter.engine.driver import DraftJob, Job, Models, TargetJob
from sprinter.engine.pair import Pair
from sprinter.engine.rows import Feed
from sprinter.engine.steps import DraftPlan, DraftRow, TargetRow
from sprinter.engine.task import Parts
from sprinter.errors import SprinterError, UserError
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws
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
    """

    target_s: dict[int, float]
    draft_s: float

    def pass_s(self, tokens: float) -> float:
        """Seconds of a target pass over a mean number of tokens, >= 1; beyond the longest, along the last slope."""
        points = sorted(self.target_s.items())
        spans = list(pairwise(points))
        (low, low_s), (high, high_s) = next((span for span in spans if tokens <= span[1][0]), spans[-1])
        return low_s + (high_s - low_s) * (tokens - low) / (high - low)

    def token_s(self, run: Replay) -> float:
        """Seconds of both models per new token of a replay."""
        drafted = run.draft_steps * self.draft_s
        asked = run.target_calls * self.pass_s(run.read / run.target_calls) if run.target_calls else 0.0
        return (drafted + asked) / run.tokens

    @property
    def optimal(self) -> str:
        """The method ``optimal`` with these costs: a draft step, and each further token of a target pass."""
        one, most = self.pass_s(1), max(self.target_s)
        token = max(0.0, self.pass_s(most) / one - 1) / max(1, most - 1)
        return f"optimal(step={self.draft_s / one:.2g}, token={token:.2g})"

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
    models = Parts(pair.models, pair.heads).take(context + longest, 1, needs_target=True, needs_draft=True)
    ids = [i % min(100, pair.models.vocab_size) for i in range(context + longest)]
    for rows in (models.target, models.draft):
        assert rows is not None
        rows.read_prompts([Feed(0, 0, ids[:context])])
    heads = {"gate": pair.gate} if pair.gate is not None else {}
    plan = DraftPlan(sampling, ("entropy",), heads)
    step = DraftJob(DraftRow(0, ids[context : context + 1], context + 1, 1, AddressedDraws(), plan))
    jobs: dict[int, Job] = {0: step}
    for n in range(1, longest + 1):
        jobs[n] = TargetJob(TargetRow(Feed(0, context, ids[context : context + n]), sampling))
    times: dict[int, list[float]] = {n: [] for n in jobs}
    with torch.inference_mode():
        for repeat in range(repeats + 1):
            for n, job in jobs.items():
                seconds = _run_s(models, job)
                if repeat:
                    times[n].append(seconds)
            if progress is not None:
                progress(repeat, repeats)
    medians = {n: median(each) for n, each in times.items()}
    return PassTimes({n: seconds for n, seconds in medians.items() if n}, medians[0])


def _run_s(models: Models, job: Job) -> float:
    began = time.perf_counter()
    (done,) = models.run([job])
    if isinstance(done, SprinterError):
        raise done
    return time.perf_counter() - began
