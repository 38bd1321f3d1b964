"""Training of EAGLE-3's head on texts of the target, the target itself frozen (Li et al. 2025, section 3.2).

Its training-time test are the steps of ``EntryLearner``. P-EAGLE's steps read its mask instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.eagle3 import Eagle3Heads, ParallelHeads
from sprinter.training.drafts.eagle import EntryLearner
from sprinter.training.drafts.learner import RANKS, draw_matrices
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.student import layer_config

__all__ = ["Eagle3Learner", "ParallelLearner", "fresh_eagle3", "mask_token"]


def mask_token(target: PreTrainedModel) -> int:
    """The token that ends texts, as mask: its embedding is surely trained, and no text goes on after it."""
    ends = target.config.get_text_config(decoder=True).eos_token_id
    return int((ends[0] if isinstance(ends, list) else ends) or 0)


def fresh_eagle3(
    target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str, kept: Tensor | None = None
) -> Eagle3Heads:
    """A head with layers of the target's shape, before training, in float32 on the target's device.

    Its output layer begins as the target's, its fusion as the mean of the three features.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
        kept: ids of the reduced vocabulary, ascending; None: all tokens.
    """
    config = layer_config(target)
    config.num_hidden_layers = settings.depth
    output: Tensor = target.get_output_embeddings().weight.detach().float()  # type: ignore[no-untyped-call]
    ids = torch.arange(config.vocab_size) if kept is None else kept
    about: dict[str, Any] = {"target_id": id, "target_fingerprint": fingerprint}
    with torch.random.fork_rng(devices=[]):
        if settings.kind == "peagle":
            mask = mask_token(target)
            heads: Eagle3Heads = ParallelHeads(config, None, len(ids), settings.steps, mask, **about)
        else:
            heads = Eagle3Heads(config, None, len(ids), **about)
    with torch.no_grad():
        heads.keep(ids)
        heads.lm_head.weight.copy_(output[ids])
        heads.fc.weight.copy_(torch.eye(config.hidden_size).repeat(1, 3) / 3)
        norm = getattr(target.base_model, "norm", None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            heads.norm.weight.copy_(norm.weight)
        draw_matrices(heads.blocks, settings.seed)
    heads.join(target)
    return heads


class Eagle3Learner(EntryLearner[Eagle3Heads]):
    """EAGLE-3's head as ``run_to_end`` trains it; ``steps``: of the training-time test."""

    def decays(self, name: str, value: Tensor) -> bool:
        """Matrices of the layers."""
        return value.ndim == 2 and name.startswith("blocks.")

    @property
    def reduced(self) -> tuple[Tensor, int]:
        """Its reduced vocabulary."""
        return self.heads.kept, self.heads.vocab_size

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Ranks of tokens; those that it cannot draft have the last one."""
        column = torch.zeros(self.heads.vocab_size, dtype=torch.int64, device=logits.device)
        column[self.heads.kept] = torch.arange(logits.shape[-1], device=logits.device)
        found = super().ranks(logits, column[tokens])
        return torch.where(self.heads.t2d[tokens], found, max(RANKS, logits.shape[-1]))


class ParallelLearner(Eagle3Learner):
    """P-EAGLE's head, which drafts ``steps`` tokens in one pass: steps after the first read the mask."""

    def given(self, step: int, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the text, or the mask's."""
        if step == 0:
            return super().given(step, ids, features)
        assert isinstance(self.heads, ParallelHeads)
        embed, feature = (one.expand_as(features) for one in self.heads.masked())
        return embed, feature
