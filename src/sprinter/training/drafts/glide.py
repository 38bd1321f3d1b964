"""Training of GliDe's layer on texts of the target, the target itself frozen (Du et al. 2024, section 3.2).

In drafting, the target has read the text up to some token, and the layer goes on from there. The paper masks the
target's keys block by block, so that each token of a block sees those before the block. Here every token is trained at
every distance from there: s tokens after the last one that the target has read, for s from 1 to the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sprinter.heads.glide import GlideHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.learner import HeadLearner, LearnerOutput, draw_matrices
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.student import layer_config

__all__ = ["GlideLearner", "fresh_glide"]


def fresh_glide(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> GlideHeads:
    """A layer before training, in float32 on the target's device.

    What attends to the target's last layer begins as that layer's own queries and output, the last norm as its last.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    with torch.random.fork_rng(devices=[]):
        heads = GlideHeads(layer_config(target), target_id=id, target_fingerprint=fingerprint)
    heads.join(target)
    inner: Any = target.base_model
    last = inner.layers[-1]
    with torch.no_grad():
        draw_matrices(heads, settings.seed)
        own_attn, its_attn = heads.cross_attn, last.self_attn
        pairs: list[tuple[Any, Any]] = [
            (heads.norm, inner.norm), (heads.cross_layernorm, last.input_layernorm),
            (own_attn.q_proj, its_attn.q_proj), (own_attn.o_proj, its_attn.o_proj),
        ]  # fmt: skip
        for own, there in pairs:
            if own.weight.shape == there.weight.shape:
                own.weight.copy_(there.weight)
                if getattr(own, "bias", None) is not None and getattr(there, "bias", None) is not None:
                    own.bias.copy_(there.bias)
    return heads


class GlideLearner(HeadLearner[GlideHeads]):
    """GliDe's layer as ``run_to_end`` trains it; ``steps``: largest distance from what the target has read."""

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By step, logits ``[n, V]`` and the target's laws of the same tokens."""
        heads = self.heads
        (states,), batch = self.states(batch), batch.to(self.target.device)
        with torch.no_grad():
            width = batch.ids.shape[1]
            places = torch.arange(width, device=batch.ids.device)
            keys = heads.target_keys(states.to(self.target.dtype), places)
        embeds = heads.embedded(batch.ids)
        query, key, value = heads.entries(embeds, places)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        for step in range(self.steps):
            # The token at i, s + 1 after the last one that the target has read, sees its keys up to i − 1 − s.
            sees = places[None] <= (places[:, None] - 1 - step).clamp(min=0)
            at, laws = batch.from_token(step + 1)
            out = heads.finish(embeds, attended, places, keys, sees)
            yield LearnerOutput(heads.token_logits(out[at // width, at % width]).float(), laws)
