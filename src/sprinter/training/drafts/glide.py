"""Training of GliDe's layer on texts of the target, the target itself frozen (Du et al. 2024, section 3.2).

In drafting, the target has read the text up to some token, and the layer goes on from there. The paper masks the
target's keys block by block, so that each token of a block sees those before the block. Here every token is trained at
every distance from there: s tokens after the last one that the target has read, for s from 1 to the number of steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.heads.glide import GlideHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.head_learner import HeadLearner, HeadOutput, draw_matrices
from sprinter.training.drafts.losses import TopLaws
from sprinter.training.drafts.settings import HeadSettings, StudentSettings
from sprinter.training.drafts.student import embedding_table, student_config

__all__ = ["GlideLearner", "fresh_glide"]


def fresh_glide(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> GlideHeads:
    """A layer before training, in float32 on the target's device.

    What attends to the target's last layer begins as that layer's own queries and output, the last norm as its last.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    config = student_config(target, StudentSettings(layers=1), embedding_table(target))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        heads = GlideHeads(config, target_id=id, target_fingerprint=fingerprint)
    heads.join(target)
    inner: Any = target.base_model
    last = inner.layers[-1]
    with torch.no_grad():
        draw_matrices(heads, settings.seed)
        pairs: list[tuple[Any, Any]] = [
            (heads.norm, inner.norm),
            (heads.cross_layernorm, last.input_layernorm),
        ]
        pairs += [
            (heads.cross_attn.q_proj, last.self_attn.q_proj),
            (heads.cross_attn.o_proj, last.self_attn.o_proj),
        ]
        for own, there in pairs:
            if own.weight.shape == there.weight.shape:
                own.weight.copy_(there.weight)
                if getattr(own, "bias", None) is not None and getattr(there, "bias", None) is not None:
                    own.bias.copy_(there.bias)
    return heads


class GlideLearner(HeadLearner):
    """GliDe's layer as ``run_to_end`` trains it.

    Args:
        heads: fresh. steps: largest distance from what the target has read. other: as in ``HeadLearner``.
    """

    def __init__(
        self, heads: GlideHeads, target: PreTrainedModel, discount: float, temperature: float, steps: int = 4
    ) -> None:
        super().__init__(heads, target, discount, temperature)
        self._own, self._steps = heads, steps

    def decays(self, name: str, value: Tensor) -> bool:
        """All matrices."""
        return value.ndim == 2

    def digest(self) -> str:
        """Hash of the layer, and of how it is trained."""
        return hashlib.sha256(f"{super().digest()}{self._steps}".encode()).hexdigest()

    def outputs(self, batch: TextBatch) -> Iterator[HeadOutput]:
        """By step, logits ``[n, V]`` and the target's laws of the same tokens."""
        heads = self._own
        (states,), batch = self.states(batch), batch.to(self.target.device)
        with torch.no_grad():
            width = batch.ids.shape[1]
            places = torch.arange(width, device=batch.ids.device)
            keys = heads.target_keys(states.to(self.target.dtype), places)
        embeds = heads.embedded(batch.ids)
        query, key, value = heads.entries(embeds, places)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        for step in range(self._steps):
            # The token at i, s + 1 after the last one that the target has read, sees its keys up to i − 1 − s.
            sees = places[None] <= (places[:, None] - 1 - step).clamp(min=0)
            there = batch.places % width >= step + 1
            at = batch.places[there]
            out = heads.finish(embeds, attended, places, keys, sees)
            laws = TopLaws(*(one[there] for one in batch.laws))
            yield HeadOutput(heads.token_logits(out[at // width, at % width]).float(), laws)
