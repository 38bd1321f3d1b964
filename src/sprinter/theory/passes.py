"""Seconds of a pair's forward passes behind texts of a given length, as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from sprinter.decode.costs import PassCosts
from sprinter.engine.backends.base import DraftPlan, PassInput
from sprinter.engine.costs import borrow, draft_input, read_prompts, run_interleaved, target_input
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["LONGEST", "measure_passes", "time_passes"]

LONGEST = 9
"""Tokens of the longest target pass that is timed: a draft of 8 and the token before it."""
_RUN = 4  # steps of the draft runs that are timed: what starting a run costs is part of its steps


def measure_passes(
    pair: Pair,
    *,
    context: int = 256,
    repeats: int = 7,
    sampling: Sampling = Sampling(),
    progress: Callable[[int, int], None] | None = None,
) -> PassCosts:
    """Costs of target passes over 1 to ``LONGEST`` tokens, and of a draft step; see ``time_passes``."""
    seconds, draft_s, _ = time_passes(pair, context, LONGEST, repeats, sampling, progress)
    return PassCosts(tuple(seconds.items()), ((1, draft_s), (2, draft_s)))


def time_passes(
    pair: Pair,
    context: int,
    longest: int,
    repeats: int,
    sampling: Sampling = Sampling(),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[int, float], float, float]:
    """Medians of interleaved repeats: one pass of each length and a draft run a repeat, after a warm-up. The target's
    pass before a run has left little of the draft in the processor's caches, as in a text.

    Args:
        context: tokens before the pass; fewer if the models' context is shorter.

    Returns:
        Seconds of a target pass over n tokens, by n from 1 to ``longest``; of a step of a run of four: forward pass,
        law, draw, entropy, and the gate if the pair has one; and of the gate, within those.

    Raises:
        UserError: the pair has no draft. SprinterError: a model fails.
    """
    if pair.models.draft is None:
        raise UserError("a probe times both models, and this pair has no draft: give draft=...")
    context = max(1, min(context, pair.models.context - longest))
    models = borrow(pair.models, context + longest)
    ids = read_prompts(models, context, longest)
    run, heads = min(_RUN, longest), [{}] if pair.gate is None else [{}, {"gate": pair.gate}]
    jobs: dict[int, PassInput] = {}
    for n in range(1, longest + 1):
        jobs[n] = target_input(ids, context, n, sampling)
        for i, own in enumerate(heads):
            if n == min(i + 1, longest):
                plan = DraftPlan(sampling, ("entropy",), own)
                jobs[-i] = draft_input(ids, context, 1, plan, count=run)
    medians = {n: median(each) for n, each in run_interleaved(models, jobs, repeats, progress).items()}
    draft_s, bare = medians.get(-1, medians[0]) / run, medians[0] / run
    return {n: seconds for n, seconds in medians.items() if n > 0}, draft_s, max(0.0, draft_s - bare)
