"""Training of Medusa's heads on texts of the target, the target frozen (Medusa-1, Cai et al. 2024, section 2.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.drafting import OutputLayer
from sprinter.heads.medusa import MedusaHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.learner import HeadLearner, LearnerOutput
from sprinter.training.drafts.settings import HeadSettings

__all__ = ["MedusaLearner", "fresh_medusa"]


def fresh_medusa(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> MedusaHeads:
    """Heads whose laws are the target's own next-token law, before training, in float32 on the target's device.

    Where the target bounds its logits, as Gemma 2 does, only heads that share its output layer begin so.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    weight: Tensor = target.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    vocab, hidden = weight.shape
    output = OutputLayer(target, vocab)
    heads = MedusaHeads(
        hidden, vocab, settings.steps, settings.depth, settings.share_output,
        target_id=id, target_fingerprint=fingerprint,
    )  # fmt: skip
    if not settings.share_output:
        with torch.no_grad():
            for own in heads.heads:
                own[settings.depth].weight.copy_(output.scale * weight)  # type: ignore[index]
    heads.join(target)
    return heads


class MedusaLearner(HeadLearner[MedusaHeads]):
    """Medusa's heads as ``run_to_end`` trains them.

    Head h, from 0, reads the target's state h + 2 places before a token and learns the target's law of that token. The
    law was computed after tokens that the head does not see, so what it learns is their mean.
    """

    @property
    def about(self) -> tuple[object, ...]:
        """The discount alone: the number of heads is in their weights."""
        return (self.discount,)

    def decays(self, name: str, value: Tensor) -> bool:
        """Matrices of the blocks; output layers begin as the target's, and stay near it."""
        return value.ndim == 2 and "linear" in name

    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By head, its logits ``[n, V]`` and the target's laws of the same tokens."""
        (states,), batch = self.states(batch), batch.to(self.target.device)
        states = states.reshape(-1, states.shape[-1])
        for head in range(self.heads.count):
            back = head + 1  # from the state that the law was computed at to the one that the head reads
            at, laws = batch.from_token(back)
            yield LearnerOutput(self.heads.head_logits(head, states[at - back]).float(), laws)
