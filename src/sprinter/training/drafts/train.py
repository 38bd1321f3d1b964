"""Trains a student on texts of the target; ``run`` has the steps, the schedule and the checkpoints.

A student that drafts several tokens in one pass (PARD, An et al. 2025, arXiv 2504.18583) reads each text with masks:
those of depth 1, 2, ... behind each of its tokens. A mask sees the text up to that token, and the masks between.
"""

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
from sprinter.training.drafts.losses import TopLaws
from sprinter.training.drafts.run import LossPoint, Run, loss_temperature, run_to_end
from sprinter.training.drafts.settings import TrainingSettings

__all__ = ["OnPolicy", "StudentLearner", "settle_scale", "train"]

OnPolicy = Callable[[LlamaForCausalLM, int], Sequence[TargetText]]
"""The target's verdicts on drafts of a student, in a round: texts whose positions the drafts visit. They follow from
the student's weights and the round's number."""


_KEPT, _LEAST = 0.7, 0.2
"""Share of the masks of a depth that are trained, relative to the depth before, and of all: PARD's."""


class StudentLearner(Learner):
    """A student as ``run_to_end`` trains it.

    Args:
        parallel: tokens that it drafts in one pass.
    """

    module: LlamaForCausalLM

    def __init__(self, module: LlamaForCausalLM, temperature: float, parallel: int = 1) -> None:
        super().__init__(module, temperature)
        self._parallel = parallel

    @property
    def reduced(self) -> tuple[Tensor, int] | None:
        """Those of a reduced vocabulary."""
        head = self.module.lm_head
        return (head.ids, head.out_features) if isinstance(head, CutHead) else None

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By number of masks before it, logits ``[n, k]`` at the places of a batch."""
        student, head = self.module, self.module.lm_head
        words = head.words if isinstance(head, CutHead) else head
        batch = batch.to(student.device)
        if self._parallel == 1:
            states = student.model(input_ids=batch.ids, use_cache=False).last_hidden_state
            yield LearnerOutput(words(states.reshape(-1, states.shape[-1])[batch.places]), batch.laws)
            return
        width, device = batch.ids.shape[1], batch.ids.device
        depth, place = self._entries(batch.ids).nonzero(as_tuple=True)
        last = place - depth  # the token of the text that it sees last
        sees = (depth == 0) & (place <= last[:, None])
        sees |= (last == last[:, None]) & (depth <= depth[:, None])
        masked = torch.where(depth == 0, batch.ids[:, place], student.config.pard_token)
        states = student.model(
            input_ids=masked, position_ids=place[None], attention_mask=sees[None, None], use_cache=False
        ).last_hidden_state
        number = torch.full((self._parallel, width), -1, device=device)
        number[depth, place] = torch.arange(len(place), device=device)
        for one in range(self._parallel):
            at, laws = batch.from_token(one)
            column = number[one, at % width]
            there = column >= 0
            rows, columns = (at // width)[there], column[there]
            yield LearnerOutput(words(states[rows, columns]), TopLaws(*(each[there] for each in laws)))

    def _entries(self, ids: Tensor) -> Tensor:
        """Which places ``[parallel, width]`` have an entry: the text's all, and of masks in training some. A mask is
        left out with those that follow it; which ones is a function of the texts, so that a resumed run draws the
        same."""
        count, width = self._parallel, ids.shape[1]
        share = torch.tensor([max(_KEPT**depth, _LEAST) if depth else 1.0 for depth in range(count)])
        drawn = torch.zeros(width)
        if self.module.training:
            seed = int.from_bytes(hashlib.sha256(ids.cpu().numpy().tobytes()).digest()[:7], "big")
            drawn = torch.rand(width, generator=torch.Generator().manual_seed(seed))
        last = torch.arange(width) - torch.arange(count)[:, None]
        return ((last >= 0) & (drawn[last.clamp(min=0)] < share[:, None])).to(ids.device)

    def decays(self, name: str, value: Tensor) -> bool:
        """Matrices other than embeddings."""
        return value.ndim == 2 and ".layers." in name

    def digest(self) -> str:
        """Hash of the shape and of all weights."""
        config = json.dumps(self.module.config.to_dict(), sort_keys=True, default=str)
        digest = hashlib.sha256(f"{config}{'' if self._parallel == 1 else self._parallel}".encode())
        for name, value in sorted(self.module.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()


def train(
    student: LlamaForCausalLM,
    texts: Texts,
    settings: TrainingSettings,
    out: Path,
    *,
    parallel: int = 1,
    on_policy: OnPolicy | None = None,
    progress: Callable[[LossPoint, int], None] | None = None,
) -> Run:
    """Train a student on texts of the target, or continue a run that was interrupted.

    Args:
        student: a fresh student; trained in place. parallel: as in ``StudentSettings``.
        on_policy: needed if ``settings.on_policy`` is above 0.
        other: as in ``run_to_end``, which says what is raised too.
    """
    if settings.on_policy and on_policy is None:
        raise UserError("on_policy needs the target, to judge the student's drafts: give it, or on_policy=0")
    judge = None if on_policy is None else lambda number: on_policy(student, number)
    student.lm_head.requires_grad_(not settings.freeze_embeddings)
    if not student.config.tie_word_embeddings:  # an input embedding of its own stays the target's
        student.get_input_embeddings().requires_grad_(False)
    learner = StudentLearner(student, loss_temperature(settings, texts), parallel)
    return run_to_end(learner, texts, settings, out, judge=judge, progress=progress)


@torch.no_grad()
def settle_scale(
    student: LlamaForCausalLM, texts: Sequence[TargetText], tokens: int, temperature: float
) -> float:
    """Scale the last norm so that the laws of a fresh student are least wrong on one batch of texts.

    Copied layers write states of another size than the last norm and the output layer expect; the laws are sure and
    wrong then, and AdamW, whose steps do not grow with a parameter, takes long to undo it.

    Returns:
        KL of its laws on the batch.
    """
    batch, norm = next(in_order(texts, tokens)), student.model.norm.weight
    learner = StudentLearner(student, temperature)
    before, best = norm.clone(), (math.inf, 1.0)
    for factor in (2 ** (-half / 2) for half in range(13)):
        norm.copy_(before * factor)
        best = min(best, (float(learner.losses(batch).parts["kl"].mean()), factor))
    norm.copy_(before * best[1])
    return best[0]
