"""The models of a pair with their rows, and the passes that requests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.draft import AskForced
from sprinter.engine.backends.base import (
    DraftRow,
    PassInput,
    PassOutput,
    PromptRow,
    TreeRow,
)  # fmt: skip
from sprinter.engine.backends.cuda_graph import backend_of
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.prefix import HeldRows
from sprinter.models.interface import Runner

__all__ = ["Executor"]


class Executor:
    """Both models of a pair, their rows, and the passes over them.

    Args:
        target, draft: runners with the same number of rows; None if no request needs the model.
        vocab: size of the common vocabulary.
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
        held: tuple[HeldRows | None, HeldRows | None] = (None, None),
    ) -> None:
        self.target = backend_of(target, vocab, "target", held[0]) if target else None
        self.draft = backend_of(draft, vocab, "draft", held[1]) if draft else None
        self.vocab = vocab
        rows = self.target or self.draft
        self.device = rows.runner.device if rows else torch.device("cpu")
        self.like = torch.empty(0, device=self.device)

    @property
    def models(self) -> list[EagerBackend]:
        """The backends of the models that are there."""
        return [rows for rows in (self.target, self.draft) if rows is not None]

    def gather(self, laws: Tensor) -> Tensor:
        """Move laws of either model to ``device``."""
        return laws.to(self.device)

    def run(self, inputs: Sequence[PassInput]) -> Sequence[PassOutput]:
        """Run inputs of one kind (and of one model) in one pass or step; returns their outputs in order.

        An exception that is raised concerns all of them: their rows must not be read again.
        """
        first, given = inputs[0], list[Any](inputs)
        if isinstance(first, AskForced):
            return [_found(one) for one in given]
        if isinstance(first, PromptRow):
            rows = self.target if first.model == "target" else self.draft
            assert rows is not None
            return rows.read(given)
        rows = self.draft if isinstance(first, DraftRow | TreeRow) else self.target
        assert rows is not None, "the method asks a model that was not given"
        if isinstance(first, DraftRow):
            return rows.draft(given)
        return rows.tips(given) if isinstance(first, TreeRow) else rows.score(given)


def _found(ask: AskForced) -> PassOutput:
    """What a grammar forces, or its error, which concerns this text alone."""
    try:
        return ask.found.result()
    except Exception as error:
        return error
