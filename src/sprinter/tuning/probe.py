"""What the tuner knows of a pair before it runs any method: laws along the target's texts, and times of passes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sprinter.bench.sample import Suite
from sprinter.bench.suites import turn_prompt
from sprinter.bench.suites.turns import TurnPrompt
from sprinter.decode.costs import PassCosts
from sprinter.engine.pair import Pair
from sprinter.laws import Sampling, overlap
from sprinter.theory.passes import measure_passes
from sprinter.theory.recording import Passage, Recording, read_passages
from sprinter.training.calibrate import pool_adjacent_violators

__all__ = ["PairProbe", "prompt_facts", "run_probe", "usable_prompts"]

_FULL = 512  # tokens of a vocabulary that is recorded whole: replays of fewer outcomes take less time
_REPEATS = 9  # of each forward pass: one wrong length would mislead the choice of draft lengths
Step = Callable[[str, int, int], None]
"""Progress: (stage, steps done, steps in total)."""


@dataclass(frozen=True)
class PairProbe:
    """A pair's laws and times.

    Attributes:
        recording: both models' laws along texts that the target wrote after the prompts.
        costs: of forward passes, behind texts of the prompts' length.
    """

    recording: Recording
    costs: PassCosts

    @property
    def some(self) -> Recording:
        """The laws along the first quarter of the texts."""
        return self.recording.first_texts(math.ceil(len(self.recording.lengths) / 4))

    @property
    def mean_tokens(self) -> float:
        """Mean number of new tokens a text."""
        return len(self.recording.tokens) / len(self.recording.lengths)


def usable_prompts(pair: Pair, suite: Suite, new_tokens: int) -> list[TurnPrompt]:
    """The first turn of each sample that fits into the pair's context with ``new_tokens`` after it."""
    found = (turn_prompt(pair, sample, 0, [], chat=suite.chat) for sample in suite.samples)
    return [prompt for prompt in found if 0 < len(prompt.ids) <= pair.models.context - new_tokens]


def run_probe(
    pair: Pair,
    prompts: Sequence[TurnPrompt],
    sampling: Sampling,
    new_tokens: int,
    seed: int,
    step: Step,
    until: float = math.inf,
) -> PairProbe:
    """Write one text a prompt with the target, read all of them with both models, and time forward passes.

    Args:
        new_tokens: maximum length of a text.
        step: called after each step.
        until: time (``time.monotonic``) after which no further text is begun.
    """
    stage, passages = "texts by the target", []
    for i, prompt in enumerate(prompts):
        out = pair.generate(
            prompt.ids, method="autoregressive", max_new_tokens=new_tokens, sampling=sampling, seed=seed + i,
            stop_token_ids=prompt.stop_token_ids,
        )  # fmt: skip
        passages.append(Passage(tuple(prompt.ids), tuple(token.id for token in out.tokens)))
        step(stage, i + 1, len(prompts))
        if time.monotonic() >= until:
            break
    read = read_passages(
        pair, passages, sampling=sampling, full=_FULL,
        progress=lambda done, wanted: step("laws along texts", done, wanted),
    )  # fmt: skip
    lengths = [len(prompt.ids) for prompt in prompts]
    costs = measure_passes(
        pair, context=int(np.mean(lengths)) + new_tokens // 2, repeats=_REPEATS, sampling=sampling,
        progress=lambda done, wanted: step("times of forward passes", done, wanted),
    )  # fmt: skip
    costs = replace(costs, target=_rising(costs.target))
    # The target drew every token from its processed law.
    return PairProbe(replace(read, writer="target", new_tokens=new_tokens), costs)


def _rising(times: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The nearest times that do not fall with the number of tokens (isotonic regression)."""
    tokens, seconds = zip(*times, strict=True)
    rising = pool_adjacent_violators(torch.tensor(seconds, dtype=torch.float64), torch.ones(len(tokens)))
    return tuple(zip(tokens, rising.tolist(), strict=True))


def prompt_facts(recording: Recording, prompts: Sequence[TurnPrompt]) -> dict[str, Any]:
    """Mean and standard deviation over texts of the prompts' length, the draft's entropy and β; see ``Profile``."""
    edges = list(pairwise([*recording.starts, len(recording.tokens)]))

    def by_text(values: Tensor) -> list[float]:
        return _spread([float(values[first:last].double().mean()) for first, last in edges])

    return {
        "prompt_tokens": _spread([float(len(prompt.ids)) for prompt in prompts]),
        "entropy": by_text(recording.signals["entropy"]),
        "overlap": by_text(overlap(recording.p, recording.q)),
    }


def _spread(values: Sequence[float]) -> list[float]:
    return [float(np.mean(values)), float(np.std(values))]
