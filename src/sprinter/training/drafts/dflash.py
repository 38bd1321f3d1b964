"""Training of DFlash's model on texts of the target, the target itself frozen (arXiv 2602.06036).

Every token of a text begins a block, all of which are trained at once: a block sees the target's states before its
first token, and itself. The paper draws some of the blocks, and weighs the tokens of a block by their distance as
``discount`` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.dflash import DFlashHeads
from sprinter.heads.eagle3 import aux_layers
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.eagle3 import mask_token
from sprinter.training.drafts.learner import HeadLearner, LearnerOutput, draw_matrices
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.student import layer_config

__all__ = ["DFlashLearner", "fresh_dflash"]


def fresh_dflash(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> DFlashHeads:
    """Layers of the target's shape before training, in float32 on the target's device.

    The fusion begins as the mean of the layers that EAGLE-3 fuses too, the last norm as the target's. Only the
    first token of a block can be the mask itself.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    config = layer_config(target)
    config.num_hidden_layers = settings.depth
    own = target.config.get_text_config(decoder=True)
    ids = [one - 1 for one in aux_layers(own.num_hidden_layers)]
    with torch.random.fork_rng(devices=[]):
        mask = mask_token(target)
        heads = DFlashHeads(config, ids, settings.steps, mask, target_id=id, target_fingerprint=fingerprint)
    with torch.no_grad():
        draw_matrices(heads, settings.seed)
        heads.fc.weight.copy_(torch.eye(config.hidden_size).repeat(1, len(ids)) / len(ids))
        norm = getattr(target.base_model, "norm", None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            heads.norm.weight.copy_(norm.weight)
    heads.join(target)
    return heads


class DFlashLearner(HeadLearner[DFlashHeads]):
    """DFlash's model as ``run_to_end`` trains it; ``steps``: tokens of a pass."""

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By place in the block, logits ``[n, V]`` and the target's laws of the same tokens."""
        heads, size = self.heads, self.steps + 1
        states, batch = self.states(batch), batch.to(self.target.device)
        width = batch.ids.shape[1]
        # The law at place p is that of token p + 1, the token number p + 1 − a of the block that begins with token a.
        start = max(1, int((batch.places % width).min()) - self.steps + 1)
        places = torch.arange(width - 1, device=batch.ids.device)
        context = heads.context(heads.fused(states)[:, :-1], places)
        firsts = places[start:]
        blocks = torch.full((len(batch.ids), len(firsts), size), heads.mask, device=batch.ids.device)
        blocks[..., 0] = batch.ids[:, start:-1]
        before = (places < firsts[:, None]).repeat_interleave(size, 0)  # [blocks · size, n]

        def apart(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:-2], -1, size, x.shape[-1])

        def attended(number: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = context[number]
            scores = (query @ keys.transpose(-1, -2)).masked_fill(~before, -torch.inf)
            within = (apart(query) @ apart(key).transpose(-1, -2)).flatten(-3, -2)
            weights = torch.softmax(torch.cat([scores, within], -1) / query.shape[-1] ** 0.5, -1)
            there, own = weights[..., : width - 1], weights[..., width - 1 :]
            mean: Tensor = there @ values + (apart(own) @ apart(value)).flatten(-3, -2)
            return mean

        positions = (firsts[:, None] + torch.arange(size, device=firsts.device)).flatten()
        outs = apart(heads.outputs(blocks.flatten(1), positions, attended))
        for step in range(self.steps):
            at, laws = batch.from_token(step + 1)
            out = outs[at // width, at % width - step - start, step + 1]
            yield LearnerOutput(heads.whole_logits(out).float(), laws)
