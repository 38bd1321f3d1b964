"""Trains a student on texts of the target; ``run`` has the steps, the schedule and the checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from sprinter.errors import UserError
from sprinter.models.reduced_vocab import CutHead
from sprinter.training.drafts.batches import TextBatch, collate
from sprinter.training.drafts.data import TargetText, Texts
from sprinter.training.drafts.losses import LOSSES, TopLaws, divergences, on_kept, tempered
from sprinter.training.drafts.run import Losses, LossPoint, loss_temperature, run_to_end
from sprinter.training.drafts.settings import TrainingSettings

__all__ = ["OnPolicy", "TrainedStudent", "in_order", "log_laws", "settle_scale", "train", "validate"]


class OnPolicy(Protocol):
    """Judges drafts of the student: texts whose positions the student's drafts visit."""

    def __call__(self, student: LlamaForCausalLM, round: int) -> Sequence[TargetText]:
        """The texts of a round, a pure function of the student's weights and the round's number."""
        ...


@dataclass(slots=True)
class TrainedStudent:
    """A trained student.

    Attributes:
        student: the model, in evaluation mode.
        history: one point per checkpoint.
        steps, tokens, seconds: of the whole training.
        resumed: step that an earlier run had reached; 0: none.
    """

    student: LlamaForCausalLM
    history: list[LossPoint] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    resumed: int = 0


def train(
    student: LlamaForCausalLM,
    texts: Texts,
    settings: TrainingSettings,
    out: Path,
    *,
    on_policy: OnPolicy | None = None,
    progress: Callable[[LossPoint, int], None] | None = None,
) -> TrainedStudent:
    """Train a student on texts of the target, or continue a run that was interrupted.

    Args:
        student: a fresh student; trained in place.
        texts: of the target, with its laws.
        settings: how to train.
        out: directory of the checkpoint.
        on_policy: needed if ``settings.on_policy`` is above 0.
        progress: called at each checkpoint with the newest point and the number of steps in all.

    Raises:
        UserError: a checkpoint of other settings, texts or student; a full disk.
        SprinterError: the loss is not finite.
    """
    if settings.on_policy and on_policy is None:
        raise UserError("on_policy needs the target, to judge the student's drafts: give it, or on_policy=0")
    judge = None if on_policy is None else lambda number: on_policy(student, number)
    learner = _Student(student, settings, loss_temperature(settings, texts))
    run = run_to_end(learner, texts, settings, out, judge=judge, progress=progress)
    return TrainedStudent(student, run.history, run.steps, run.tokens, run.seconds, run.resumed)


def log_laws(student: LlamaForCausalLM, batch: TextBatch, temperature: float = 1.0) -> tuple[Tensor, TopLaws]:
    """ln q at the places of a batch, and the target's laws there, both at a temperature.

    A cut vocabulary has one further column, which stands for all tokens outside: their ln q is −inf.

    Returns:
        ``[n, V]``, or ``[n, kept + 1]`` with laws whose ids are columns.
    """
    batch = batch.to(student.device)
    states = student.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    states = states.reshape(-1, states.shape[-1])[batch.places]
    laws, head = tempered(batch.laws, temperature), student.lm_head
    if not isinstance(head, CutHead):
        return torch.log_softmax(head(states) / temperature, -1), laws
    return on_kept(torch.log_softmax(head.words(states) / temperature, -1), laws, head.ids, head.out_features)


@torch.no_grad()
def validate(
    student: LlamaForCausalLM, texts: Sequence[TargetText], tokens: int, temperature: float
) -> dict[str, float]:
    """Mean losses over all positions of texts; empty without texts."""
    sums, count = dict.fromkeys(LOSSES, 0.0), 0
    for batch in in_order(texts, tokens):
        parts = divergences(*log_laws(student, batch, temperature))
        sums = {name: sums[name] + float(parts[name].sum()) for name in sums}
        count += len(batch.places)
    return {name: value / count for name, value in sums.items()} if count else {}


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
    before, best = norm.clone(), (math.inf, 1.0)
    for factor in (2 ** (-half / 2) for half in range(13)):
        norm.copy_(before * factor)
        best = min(best, (float(divergences(*log_laws(student, batch, temperature))["kl"].mean()), factor))
    norm.copy_(before * best[1])
    return best[1]


def in_order(texts: Sequence[TargetText], tokens: int) -> Iterator[TextBatch]:
    """Batches of texts, by rising length."""
    part: list[TargetText] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        if part and len(text.ids) * (len(part) + 1) > tokens:
            yield collate(part)
            part = []
        part.append(text)
    if part:
        yield collate(part)


class _Student:
    """A student as ``run_to_end`` trains it."""

    def __init__(self, student: LlamaForCausalLM, settings: TrainingSettings, temperature: float) -> None:
        self.student, self.temperature = student, temperature
        # An input embedding of its own stays the target's.
        student.lm_head.requires_grad_(not settings.freeze_embeddings)
        if not student.config.tie_word_embeddings:
            student.get_input_embeddings().requires_grad_(False)

    def named(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.student.named_parameters() if value.requires_grad}

    def decays(self, name: str, value: Tensor) -> bool:
        return value.ndim == 2 and ".layers." in name

    def losses(self, batch: TextBatch) -> Losses:
        return Losses(divergences(*log_laws(self.student, batch, self.temperature)))

    def held_out(self, texts: Sequence[TargetText], tokens: int) -> dict[str, float]:
        return validate(self.student, texts, tokens, self.temperature)

    def training(self, on: bool) -> None:
        self.student.train(on)

    def digest(self) -> str:
        config = json.dumps(self.student.config.to_dict(), sort_keys=True, default=str)
        digest = hashlib.sha256(config.encode())
        for name, value in sorted(self.student.state_dict().items()):
            digest.update(name.encode() + value.cpu().numpy().tobytes())
        return digest.hexdigest()
