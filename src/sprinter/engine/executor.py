"""The models of a pair with their rows, and the passes over them that requests share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sprinter.engine.prefix import HeldRows
from sprinter.engine.rows import FINAL, CacheRows, RowInput
from sprinter.engine.steps import Drafted, DraftRow, Scored, StepsOfPair, TargetRow, eager_steps
from sprinter.engine.trees import TipLaws, TreeRow, TreeSteps
from sprinter.models.interface import Runner

__all__ = ["Executor", "PassInput", "PassOutput", "PromptRead", "PromptRow"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chunk of a prompt's prefill in the row of a model, "target" or "draft"; ``layers``: whose states to return."""

    model: str
    feed: RowInput
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Time of a prefill chunk in seconds, and hidden states ``[n, d]`` of each of the row's layers.

    ``copied``: number of its tokens that another row read in the same step.
    """

    seconds: float
    states: Sequence[Tensor] = ()
    copied: int = 0


PassInput = PromptRow | DraftRow | TreeRow | TargetRow
"""What a request asks of the models."""
PassOutput = PromptRead | list[Drafted] | TipLaws | Scored | Exception
"""What they made of it; an exception concerns this request alone."""


class Executor:
    """Both models of a pair, their rows, and the passes over them.

    Args:
        target, draft: runners with the same number of rows; None if no request needs the model.
        vocab: size of the common vocabulary.
        steps: makes draft steps and target forward passes; eager by default.
        held: what the rows of target and draft hold from earlier texts; None: nothing.

    Attributes:
        device: of all laws that requests get: the target's; without a target, the draft's.
        like: a tensor with the dtype and device of laws.
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
        self.vocab = vocab
        drafting, passes = steps(self.draft, self.target)
        self._steps: dict[type[PassInput], Any] = {DraftRow: drafting, TargetRow: passes}
        if self.draft:
            self._steps[TreeRow] = TreeSteps(self.draft)
        rows = self.target or self.draft
        self.device = rows.runner.device if rows else torch.device("cpu")
        self.like = torch.empty(0, device=self.device)

    @property
    def target_size(self) -> int:
        """Size of the target's hidden states; 0 without a target."""
        return self.target.runner.hidden_size if self.target else 0

    @property
    def models(self) -> list[CacheRows]:
        """The rows of the models that are there."""
        return [rows for rows in (self.target, self.draft) if rows is not None]

    def gather(self, laws: Tensor) -> Tensor:
        """Move laws of either model to ``device``."""
        return laws.to(self.device)

    def run(self, inputs: Sequence[PassInput]) -> list[PassOutput]:
        """Run inputs of one kind (and of one model) in one pass or step; returns their outputs in order.

        An exception that is raised concerns all of them: their rows must not be read again.
        """
        first = inputs[0]
        if isinstance(first, PromptRow):
            return self._read_prompts(first.model, [one for one in inputs if isinstance(one, PromptRow)])
        return list(self._steps[type(first)](inputs))

    def _read_prompts(self, model: str, prompts: Sequence[PromptRow]) -> list[PassOutput]:
        rows = self.target if model == "target" else self.draft
        assert rows is not None
        layers = sorted({layer for one in prompts for layer in one.layers} - {FINAL})
        wanted = layers if any(one.layers for one in prompts) else None
        began = time.perf_counter()
        states, copied = rows.read_prompts([one.feed for one in prompts], wanted)
        seconds = (time.perf_counter() - began) / len(prompts)
        read: list[PassOutput] = []
        for one in prompts:
            made = dict(zip((FINAL, *layers), states.get(one.feed.row, ()), strict=False))
            read.append(
                PromptRead(seconds, [made[layer] for layer in one.layers], copied.get(one.feed.row, 0))
            )
        return read
