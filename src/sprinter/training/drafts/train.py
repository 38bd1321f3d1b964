"""Trains a student on texts of the target; ``run`` has the steps, the schedule and the checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from sprinter.errors import UserError
from sprinter.models.reduced_vocab import CutHead
from sprinter.training.drafts.batches import TextBatch, in_order
from sprinter.training.drafts.data import TargetText, Texts
from sprinter.training.drafts.learner import Learner, LearnerOutput
from sprinter.training.drafts.run import LossPoint, Run, loss_temperature, run_to_end
from sprinter.training.drafts.settings import TrainingSettings

__all__ = ["OnPolicy", "StudentLearner", "settle_scale", "train"]

OnPolicy = Callable[[LlamaForCausalLM, int], Sequence[TargetText]]
"""The target's verdicts on drafts of a student, in a round: texts whose positions the drafts visit. They follow from
the student's weights and the round's number."""


class StudentLearner(Learner):
    """A student as ``run_to_end`` trains it."""

    module: LlamaForCausalLM

    @property
    def reduced(self) -> tuple[Tensor, int] | None:
        """Those of a reduced vocabulary."""
        head = self.module.lm_head
        return (head.ids, head.out_features) if isinstance(head, CutHead) else None

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """Logits ``[n, k]`` at the places of a batch."""
        student = self.module
        batch = batch.to(student.device)
        states = student.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        head = student.lm_head
        words = head.words if isinstance(head, CutHead) else head
        yield LearnerOutput(words(states.reshape(-1, states.shape[-1])[batch.places]), batch.laws)

    def decays(self, name: str, value: Tensor) -> bool:
        """Matrices other than embeddings."""
        return value.ndim == 2 and ".layers." in name

    def digest(self) -> str:
        """Hash of the shape and of all weights."""
        config = json.dumps(self.module.config.to_dict(), sort_keys=True, default=str)
        digest = hashlib.sha256(config.encode())
        for name, value in sorted(self.module.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()


def train(
    student: LlamaForCausalLM,
    texts: Texts,
    settings: TrainingSettings,
    out: Path,
    *,
    on_policy: OnPolicy | None = None,
    progress: Callable[[LossPoint, int], None] | None = None,
) -> Run:
    """Train a student on texts of the target, or continue a run that was interrupted.

    Args:
        student: a fresh student; trained in place.
        on_policy: needed if ``settings.on_policy`` is above 0.
        other: as in ``run_to_end``, which says what is raised too.
    """
    if settings.on_policy and on_policy is None:
        raise UserError("on_policy needs the target, to judge the student's drafts: give it, or on_policy=0")
    judge = None if on_policy is None else lambda number: on_policy(student, number)
    student.lm_head.requires_grad_(not settings.freeze_embeddings)
    if not student.config.tie_word_embeddings:  # an input embedding of its own stays the target's
        student.get_input_embeddings().requires_grad_(False)
    learner = StudentLearner(student, loss_temperature(settings, texts))
    return run_to_end(learner, texts, settings, out, judge=judge, progress=progress)


@torch.no_grad()
def settle_scale(
    student: LlamaForCausalLM, texts: Sequence[TargetText], tokens: int, temperature: float
) -> float:
    """Scale the last norm so that the laws of a fresh student are least wrong on one batch of texts.

    Copied layers write states of another size than the last norm and the output layer expect; the laws are sure and
    wrong then, and AdamW, whose steps do not grow with a parameter, takes long to undo it.

    Returns:
        The factor, a power of the square root of 2.
    """
    batch, norm = next(in_order(texts, tokens)), student.model.norm.weight
    learner = StudentLearner(student, temperature)
    before, best = norm.clone(), (math.inf, 1.0)
    for factor in (2 ** (-half / 2) for half in range(13)):
        norm.copy_(before * factor)
        best = min(best, (float(learner.losses(batch).parts["kl"].mean()), factor))
    norm.copy_(before * best[1])
    return best[1]
