"""Training of EAGLE's heads on texts of the target, the target itself frozen (Li et al. 2024 and 2025).

Step 0 reads the target's features, each further step the head's own outputs of the step before, shifted by one token,
as in drafting. In step s entry i sees the entries of step 0 up to i, and its own of steps 1 to s. EAGLE and EAGLE-2
train step 0 alone; further ones are those of HASS (arXiv 2408.15766) and of EAGLE-3's training-time test.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.eagle import EagleHeads
from sprinter.heads.entries import EntryHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.learner import HeadLearner, LearnerOutput, draw_matrices
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.student import layer_config

__all__ = ["AHEAD", "EagleLearner", "EntryLearner", "fresh_eagle"]

AHEAD = 4
"""Tokens ahead whose accuracy is measured, however many steps the head is trained on."""
_NOISE = 0.1


def fresh_eagle(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> EagleHeads:
    """A head with a layer of the target's shape, before training, in float32 on the target's device.

    It begins by handing the state on: its fusion is the identity of the state, without the embedding.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    config = layer_config(target)
    with torch.random.fork_rng(devices=[]):
        heads = EagleHeads(config, target_id=id, target_fingerprint=fingerprint)
    with torch.no_grad():
        draw_matrices(heads, settings.seed)
        heads.fc.weight[:, config.hidden_size :] += torch.eye(config.hidden_size)
    heads.join(target)
    return heads


EntriesT = TypeVar("EntriesT", bound=EntryHeads)


class EntryLearner(HeadLearner[EntriesT]):
    """A head over entries as ``run_to_end`` trains it."""

    def read(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        """What step 0 reads in place of the target's features ``[rows, n, d]`` of texts of some lengths."""
        return features

    def given(self, step: int, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and features ``[rows, n, d]`` that a step reads, given its tokens and the step's before."""
        return self.heads.embedded(ids), features

    def penalty(self, out: Tensor, state: Tensor) -> Tensor | None:
        """A further loss ``[n]`` of outputs ``[n, d]`` beside the target's feature at the same tokens ``[n, d]``."""
        return None

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By step, draft logits ``[n, k]`` and the target's laws of the same tokens."""
        heads = self.heads
        states, batch = self.states(batch), batch.to(self.target.device)
        width = batch.ids.shape[1]
        truth = heads.fused(states)
        features = self.read(truth[:, :-1], batch.lengths)
        count = features.shape[1]  # entry i: the feature of token i and the embedding of token i + 1
        causal = torch.ones(count, count, dtype=torch.bool, device=features.device).tril()
        keys: list[list[Tensor]] = [[] for _ in heads.blocks]  # by layer, of each step
        values: list[list[Tensor]] = [[] for _ in heads.blocks]

        def attended(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys[number].append(key)
            values[number].append(value)
            first, *further = keys[number]
            scores = (query @ first.transpose(-1, -2)).masked_fill(~causal, -math.inf)
            own = [(query * one).sum(-1, keepdim=True) for one in further]
            weights = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(query.shape[-1]), -1)
            mean: Tensor = weights[..., :count] @ values[number][0]
            for step, one in enumerate(values[number][1:]):
                mean = mean + weights[..., count + step, None] * one
            return mean

        for step in range(self.steps):
            ids = torch.nn.functional.pad(batch.ids[:, 1 + step :], (0, step))[:, :count]
            positions = torch.arange(count, device=features.device) + step
            features = heads.outputs(*self.given(step, ids, features), positions, attended)
            # The law at place p is that of token p + 1, which entry p − 1 − step of this step drafts.
            at, laws = batch.from_token(step + 1)
            rows, places = at // width, at % width
            out = features[rows, places - 1 - step]
            yield LearnerOutput(heads.draft_logits(out).float(), laws, self.penalty(out, truth[rows, places]))


class EagleLearner(EntryLearner[EagleHeads]):
    """EAGLE's head: it also learns the target's states, and reads them with noise.

    The paper's loss is smooth L1 of the states and a tenth of the cross-entropy of laws; its noise is uniform. Here
    both are in units of the states' root mean square, which differs from target to target.

    Args:
        regression: weight of the loss of states, relative to the loss of laws. other: as in ``HeadLearner``.
    """

    def __init__(
        self,
        heads: EagleHeads,
        target: PreTrainedModel,
        discount: float,
        temperature: float,
        steps: int = 1,
        regression: float = 10.0,
    ) -> None:
        super().__init__(heads, target, discount, temperature, steps)
        self._regression, self._scale = regression, 1.0

    @property
    def about(self) -> tuple[object, ...]:
        """How it is trained."""
        return *super().about, self._regression

    def read(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        """The features, in training with uniform noise that is a function of them: a resumed run draws the same."""
        own = torch.cat([row[:length] for row, length in zip(features, lengths, strict=True)])
        self._scale = float(own.pow(2).mean().sqrt().clamp(min=1e-6))
        if not self.heads.training:
            return features
        seed = int.from_bytes(hashlib.sha256(features.cpu().numpy().tobytes()).digest()[:7], "big")
        chance = torch.Generator().manual_seed(seed)
        noise = torch.rand(features.shape, generator=chance).to(features.device) - 0.5
        return features + 2 * _NOISE * self._scale * noise

    def penalty(self, out: Tensor, state: Tensor) -> Tensor:
        """Smooth L1 of estimated states."""
        error = torch.nn.functional.smooth_l1_loss(out / self._scale, state / self._scale, reduction="none")
        return self._regression * error.mean(-1)

    def accuracies(self, texts: Sequence[TargetText], tokens: int) -> list[list[float]]:
        """As in ``HeadLearner``, ``AHEAD`` tokens ahead or more."""
        steps, self.steps = self.steps, max(self.steps, AHEAD)
        try:
            return super().accuracies(texts, tokens)
        finally:
            self.steps = steps
