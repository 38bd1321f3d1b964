"""Training of EAGLE-3's head on texts of the target, the target itself frozen (Li et al. 2025, section 3.2).

The training-time test: step 0 reads the target's features, each further step the head's own outputs of the step before,
shifted by one token, as in drafting. In step s entry i sees the entries of step 0 up to i, and its own of steps 1 to s.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.eagle3 import Eagle3Heads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.head_learner import RANKS, HeadLearner, draw_matrices
from sprinter.training.drafts.losses import TopLaws, divergences, on_kept, tempered
from sprinter.training.drafts.settings import HeadSettings, StudentSettings
from sprinter.training.drafts.student import embedding_table, student_config

__all__ = ["Eagle3Learner", "fresh_eagle3"]


def fresh_eagle3(
    target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str, kept: Tensor | None = None
) -> Eagle3Heads:
    """A head with a layer of the target's shape, before training, in float32 on the target's device.

    Its output layer begins as the target's, its fusion as the mean of the three features.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
        kept: ids of the reduced vocabulary, ascending; None: all tokens.
    """
    table = embedding_table(target)
    config = student_config(target, StudentSettings(layers=1), table)
    output: Tensor = target.get_output_embeddings().weight.detach().float()  # type: ignore[no-untyped-call]
    ids = torch.arange(config.vocab_size) if kept is None else kept
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        heads = Eagle3Heads(config, None, len(ids), target_id=id, target_fingerprint=fingerprint)
    with torch.no_grad():
        heads.keep(ids)
        heads.lm_head.weight.copy_(output[ids])
        heads.fc.weight.copy_(torch.eye(config.hidden_size).repeat(1, 3) / 3)
        norm = getattr(target.base_model, "norm", None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            heads.norm.weight.copy_(norm.weight)
        draw_matrices(heads.block, settings.seed)
    heads.join(target)
    return heads


class Eagle3Learner(HeadLearner):
    """EAGLE-3's head as ``run_to_end`` trains it.

    Args:
        heads: fresh. steps: steps of the training-time test. other: as in ``HeadLearner``.
    """

    def __init__(
        self, heads: Eagle3Heads, target: PreTrainedModel, discount: float, temperature: float, steps: int = 3
    ) -> None:
        super().__init__(heads, target, discount, temperature)
        self._own, self._steps = heads, steps

    def decays(self, name: str, value: Tensor) -> bool:
        """Matrices of the layer."""
        return value.ndim == 2 and name.startswith("block.")

    def digest(self) -> str:
        """Hash of the head, and of how it is trained."""
        return hashlib.sha256(f"{super().digest()}{self._steps}".encode()).hexdigest()

    def divergences(self, logits: Tensor, laws: TopLaws) -> dict[str, Tensor]:
        """Losses of draft logits."""
        known = torch.log_softmax(logits / self.temperature, -1)
        own = tempered(laws, self.temperature)
        return divergences(*on_kept(known, own, self._own.kept, self._own.vocab_size))

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Ranks of tokens; those that it cannot draft have the last one."""
        kept = self._own.t2d[tokens]
        column = torch.zeros(self._own.vocab_size, dtype=torch.int64, device=logits.device)
        column[self._own.kept] = torch.arange(logits.shape[-1], device=logits.device)
        found = super().ranks(logits, column[tokens])
        return torch.where(kept, found, max(RANKS, logits.shape[-1]))

    def outputs(self, batch: TextBatch) -> Iterator[tuple[Tensor, TopLaws]]:
        """By step, draft logits ``[n, draft_vocab]`` and the target's laws of the same tokens."""
        heads, batch = self._own, batch.to(self.target.device)
        with torch.no_grad():
            inner: Any = self.target.base_model
            states = inner(input_ids=batch.ids, use_cache=False, output_hidden_states=True).hidden_states
        width = batch.ids.shape[1]
        features = heads.fused([states[index] for index in heads.aux])[:, :-1]
        count = features.shape[1]  # entry i: the feature of token i and the embedding of token i + 1
        causal = torch.ones(count, count, dtype=torch.bool, device=features.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(self._steps):
            ids = torch.nn.functional.pad(batch.ids[:, 1 + step :], (0, step))
            positions = torch.arange(count, device=features.device) + step
            residual, (query, key, value) = heads.entries(heads.embedded(ids), features, positions)
            keys.append(key)
            values.append(value)
            scores = (query @ keys[0].transpose(-1, -2)).masked_fill(~causal, -math.inf)
            own = [(query * one).sum(-1, keepdim=True) for one in keys[1:]]
            weights = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(query.shape[-1]), -1)
            mean = weights[..., :count] @ values[0]
            for number, one in enumerate(values[1:]):
                mean = mean + weights[..., count + number, None] * one
            features = heads.finish(residual, mean)
            # The law at place p is that of token p + 1, which entry p − 1 − step of this step drafts.
            there = batch.places % width >= step + 1
            at = batch.places[there]
            rows, entries = at // width, at % width - 1 - step
            laws = TopLaws(*(one[there] for one in batch.laws))
            yield heads.draft_logits(features[rows, entries]).float(), laws
