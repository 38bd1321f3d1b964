"""Seconds of a pair's forward passes behind texts of a given length, as the engine runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from sprinter.decode.costs import PassCosts
from sprinter.engine.backends.base import DraftPlan, PassInput, PromptRow, RowInput
from sprinter.engine.costs import borrow, draft_input, read_prompts, run_interleaved, target_input
from sprinter.engine.engine import Engine
from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling

__all__ = ["LONGEST", "LoadCosts", "measure_load", "measure_passes", "time_passes"]

LONGEST = 9
"""Tokens of the longest target pass that is timed: a draft of 8 and the token before it."""


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
    """Medians of interleaved repeats: one pass of each length and one draft step a repeat, after a warm-up.

    Args:
        context: tokens before the pass; fewer if the models' context is shorter.

    Returns:
        Seconds of a target pass over n tokens, by n from 1 to ``longest``; of a draft step: forward pass, law, draw,
        entropy, and the gate if the pair has one; and of the gate, within those.

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
    return {n: seconds for n, seconds in medians.items() if n > 0}, draft_s, max(0.0, draft_s - bare)


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Seconds of passes that rows of different lengths share, as under load.

    Attributes:
        rows, tokens: of the passes, ascending from 1: rows, and tokens of each.
        target: of passes, ``[rows][tokens]``; the longest ones read prompts. prompts: the same of the draft.
        draft, gated: of a draft step by rows, without and with the gate.
        host: beside passes: of a step of the engine, of each row in a target pass, of each token that is drafted.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    target: tuple[tuple[float, ...], ...]
    prompts: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    gated: tuple[float, ...]
    host: tuple[float, float, float]

    def __post_init__(self) -> None:
        grid, line = (len(self.rows), len(self.tokens)), (len(self.rows),)
        named = {"target": grid, "prompts": grid, "draft": line, "gated": line, "host": (3,)}
        for name, shape in named.items():
            if (
                np.shape(value := np.array(getattr(self, name), dtype=float)) != shape
                or not (value >= 0).all()
            ):
                raise UserError(
                    f"costs: {name} is no table {shape} of seconds: give those that were measured"
                )
        if any(
            list(each)[:1] != [1] or len(each) < 2 or list(each) != sorted(set(each))
            for each in (self.rows, self.tokens)
        ):
            raise UserError(
                "costs: rows and tokens are two or more numbers, ascending from 1: give measured ones"
            )

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> LoadCosts:
        """Costs from the JSON values of their fields.

        Raises:
            UserError: they are others.
        """
        try:
            return cls(**{name: _tuples(value) for name, value in kept.items()})
        except (TypeError, ValueError) as error:
            raise UserError(f"costs: {error}: give what was measured") from None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def measure_load(pair: Pair, rows: int = 16, *, context: int = 64, repeats: int = 5) -> LoadCosts:
    """Time passes of 1, 4, ... ``rows`` rows of different lengths, and the engine's steps beside them.

    Raises:
        UserError: the pair has no draft. SprinterError: a model fails.
    """
    if pair.models.draft is None:
        raise UserError("costs of rounds are those of two models, and this pair has no draft: give draft=...")
    counts = (1, *(n for n in (4, 16, 64) if n < rows), max(2, rows))
    tokens, short = (1, 5, 16, 64), 5
    most = counts[-1]
    models = borrow(pair.models, 2 * context + tokens[-1], most)
    ids = read_prompts(models, 2 * context, tokens[-1], most)
    starts = [context // 2 + context * (5 * row % most) // most for row in range(most)]
    jobs: dict[Any, Sequence[PassInput]] = {}
    plain = DraftPlan(Sampling(), (), {})
    gated = plain if pair.gate is None else DraftPlan(Sampling(), (), {"gate": pair.gate})
    for n in counts:
        each = [*enumerate(starts[:n])]
        for t in tokens:
            prompts = {
                name: [PromptRow(name, RowInput(row, at, ids[at : at + t])) for row, at in each]
                for name in ("target", "draft")
            }
            jobs["target", n, t] = (
                [target_input(ids, at, t, row=row) for row, at in each] if t <= short else prompts["target"]
            )
            jobs["prompts", n, t] = prompts["draft"]
        for name, plan in (("draft", plain), ("gated", gated)):
            jobs[name, n] = [draft_input(ids, at, 1, plan, row) for row, at in each]
    seconds = {job: median(each) for job, each in run_interleaved(models, jobs, repeats).items()}

    def grid(name: str) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds[name, n, t] for t in tokens) for n in counts)

    draft, with_gate = (tuple(seconds[name, n] for n in counts) for name in ("draft", "gated"))
    del models, jobs
    return LoadCosts(counts, tokens, grid("target"), grid("prompts"), draft, with_gate, _host(pair, most))


def _host(pair: Pair, rows: int) -> tuple[float, float, float]:
    """Seconds beside passes of short texts, plain and drafted, in one row and in all: by least squares."""
    counted, beside = [], []
    for n in (1, rows) * 2:
        for method in ("autoregressive", "speculative(gamma=4)"):
            with Engine(pair, n, max_len=64) as engine:
                for seed in range(n):
                    engine.add([1 + seed, 2, 3, 4], method=method, max_new_tokens=16, seed=seed)
                began, steps, stats = time.perf_counter(), 0, []
                while engine.unfinished:
                    stats += [one.generation.stats for one in engine.step() if one.generation is not None]
                    steps += 1
                inside = sum(one.target_s + one.draft_s + one.prefill_s for one in stats)
                beside.append(time.perf_counter() - began - inside)
                counted.append([steps, sum(s.target_calls for s in stats), sum(s.drafted for s in stats)])
    found = np.linalg.lstsq(np.array(counted[4:], float), np.array(beside[4:]), rcond=None)[0]
    step, row, drafted = np.maximum(found, 0.0).tolist()
    return step, row, drafted
