"""The jobs that requests ask the models to run, and the models of a pair with their rows, which run them."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sprinter.engine.prefix import HeldRows
from sprinter.engine.rows import FINAL, CacheRows, Feed
from sprinter.engine.steps import (
    Drafted,
    DraftRow,
    Scored,
    StepsOfPair,
    TargetRow,
    eager_steps,
)
from sprinter.engine.trees import TipLaws, TreeRow, TreeSteps
from sprinter.errors import SprinterError
from sprinter.models.interface import Runner

__all__ = [
    "Costs", "Done", "DraftJob", "Job", "Jobs", "Models", "PromptJob", "PromptRead", "TargetJob", "TreeJob",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Costs:
    """Forward FLOPs of one token through each model (Hoffmann et al. 2022, Appendix F)."""

    target: float = 0.0
    draft: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptJob:
    """A chunk of a prompt's prefill; the result is a ``PromptRead``.

    Every job names the length that its row starts from, so that a failed or interrupted job can be run again.
    """

    model: str  # "target" or "draft"
    row: Feed
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftJob:
    """Draft steps of a request; the result is a list of ``Drafted``."""

    row: DraftRow


@dataclass(frozen=True, slots=True)
class TreeJob:
    """A draft step of a request whose draft is a tree; the result is a ``TipLaws``."""

    row: TreeRow


@dataclass(frozen=True, slots=True)
class TargetJob:
    """A target forward pass for a request; the result is a ``Scored``."""

    row: TargetRow


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Time of a prefill chunk in seconds, and hidden states ``[n, d]`` of each of the job's layers.

    ``copied``: number of its tokens that another row read in the same step.
    """

    seconds: float
    states: Sequence[Tensor] = ()
    copied: int = 0


Job = PromptJob | DraftJob | TreeJob | TargetJob
Done = PromptRead | list[Drafted] | TipLaws | Scored | SprinterError
Jobs = Generator[Job, Any, None]
"""An active request: yields jobs and is sent their results; an error as a result ends the request."""


class Models:
    """Both models of a pair, their rows, and the steps that run jobs on them.

    Args:
        target, draft: runners with the same number of rows; None if no request needs the model.
        vocab: size of the common vocabulary.
        steps: makes draft steps and target forward passes; eager by default.
        held: what the rows of target and draft hold from earlier texts; None: nothing.
    """

    def __init__(
        self,
        target: Runner | None,
        draft: Runner | None,
        vocab: int,
        steps: StepsOfPair = eager_steps,
        held: tuple[HeldRows | None, HeldRows | None] = (None, None),
    ) -> None:
        self.target = CacheRows(target, vocab, "target", held[0]) if target else None
        self.draft = CacheRows(draft, vocab, "draft", held[1]) if draft else None
        self._vocab = vocab
        drafting, passes = steps(self.draft, self.target)
        self._steps: dict[type[Job], Any] = {DraftJob: drafting, TargetJob: passes}
        if self.draft:
            self._steps[TreeJob] = TreeSteps(self.draft)
        rows = self.target or self.draft
        self._device = rows.runner.device if rows else torch.device("cpu")
        self._like = torch.empty(0, device=self._device)

    @property
    def vocab(self) -> int:
        """Size of the common vocabulary."""
        return self._vocab

    @property
    def device(self) -> torch.device:
        """The device of all laws that leave the driver: the target's; without a target, the draft's."""
        return self._device

    @property
    def target_size(self) -> int:
        """Size of the target's hidden states; 0 without a target."""
        return self.target.runner.hidden_size if self.target else 0

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of laws."""
        return self._like

    def gather(self, laws: Tensor) -> Tensor:
        """Move laws of either model to ``device``."""
        return laws.to(self.device)

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Run jobs of one kind (and of one model) in one forward pass or step; returns their results in order.

        An error in the rows of one job is the result of that job. An exception that is raised concerns no single job:
        all of them may be run again.
        """
        first = jobs[0]
        if isinstance(first, PromptJob):
            return list(self._read_prompts(first.model, jobs))
        return list(self._steps[type(first)]([job.row for job in jobs]))

    def _read_prompts(self, model: str, jobs: Sequence[Job]) -> Iterator[PromptRead]:
        rows = self.target if model == "target" else self.draft
        assert rows is not None
        prompts = [job for job in jobs if isinstance(job, PromptJob)]
        layers = sorted({layer for job in prompts for layer in job.layers} - {FINAL})
        began = time.perf_counter()
        states, copied = rows.read_prompts(
            [job.row for job in prompts], layers if any(j.layers for j in prompts) else None
        )
        seconds = (time.perf_counter() - began) / len(jobs)
        for job in prompts:
            made = dict(zip((FINAL, *layers), states.get(job.row.row, ()), strict=False))
            yield PromptRead(seconds, [made[layer] for layer in job.layers], copied.get(job.row.row, 0))
