"""Training of Medusa's heads on texts of the target, the target itself frozen (Medusa-1, Cai et al. 2024, section 2.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.heads.drafting import output_layer
from sprinter.heads.medusa import MedusaHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.losses import LOSSES, TopLaws, divergences, tempered
from sprinter.training.drafts.run import Losses
from sprinter.training.drafts.settings import HeadSettings
from sprinter.training.drafts.train import in_order

__all__ = ["RANKS", "MedusaLearner", "fresh_medusa"]

RANKS = 10
"""Ranks whose accuracy is measured: those that a tree can name."""
_TOPS = (1, 5)


def fresh_medusa(target: PreTrainedModel, settings: HeadSettings, id: str, fingerprint: str) -> MedusaHeads:
    """Heads whose laws are the target's own next-token law, before training, in float32 on the target's device.

    Args:
        target: in a floating-point dtype. id, fingerprint: of the target as it is used.
    """
    layer = output_layer(target)
    weight: Tensor = layer.weight  # type: ignore[assignment]
    vocab, hidden = weight.shape
    heads = MedusaHeads(
        hidden, vocab, settings.heads, settings.blocks, settings.share_output,
        target_id=id, target_fingerprint=fingerprint,
    )  # fmt: skip
    if not settings.share_output:
        with torch.no_grad():
            for own in heads.heads:
                own[settings.blocks].weight.copy_(weight)  # type: ignore[index]
    heads.join(target)
    return heads


class MedusaLearner:
    """Medusa's heads as ``run_to_end`` trains them.

    Head h, from 0, reads the target's state h + 2 places before a token and learns the target's law of that token. The
    law was computed after tokens that the head does not see, so what it learns is their mean.

    Args:
        heads: fresh. target: its weights, frozen. discount: as in ``HeadSettings``. temperature: of both laws.
    """

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, discount: float, temperature: float) -> None:
        self.heads, self.temperature = heads, temperature
        self._target, self._discount = target, discount
        target.requires_grad_(False)

    def named(self) -> dict[str, Tensor]:
        return dict(self.heads.heads.named_parameters())

    def decays(self, name: str, value: Tensor) -> bool:
        return value.ndim == 2 and "linear" in name  # not the output layers, which begin as the target's

    def training(self, on: bool) -> None:
        self.heads.train(on)

    def digest(self) -> str:
        return hashlib.sha256(f"{self.heads.fingerprint}{self._discount}".encode()).hexdigest()

    def losses(self, batch: TextBatch) -> Losses:
        parts, weights = [], []
        for head, (logits, laws) in enumerate(self._outputs(batch)):
            parts.append(self._divergences(logits, laws))
            weights.append(torch.full((len(logits),), self._discount**head, device=logits.device))
        return Losses({name: torch.cat([one[name] for one in parts]) for name in LOSSES}, torch.cat(weights))

    @torch.no_grad()
    def held_out(self, texts: Sequence[TargetText], tokens: int) -> dict[str, float]:
        sums: dict[str, float] = dict.fromkeys(LOSSES, 0.0)
        counts = dict.fromkeys(LOSSES, 0)

        def add(name: str, values: Tensor) -> None:
            sums[name] = sums.get(name, 0.0) + float(values.sum())
            counts[name] = counts.get(name, 0) + len(values)

        for batch in in_order(texts, tokens):
            for head, (logits, laws) in enumerate(self._outputs(batch)):
                for name, values in self._divergences(logits, laws).items():
                    add(name, values)
                ranks = _ranks(logits, laws.tokens)
                for top in _TOPS:
                    add(f"head{head + 1}_top{top}", (ranks < top).float())
        return {name: value / counts[name] for name, value in sums.items() if counts[name]}

    @torch.no_grad()
    def accuracies(self, texts: Sequence[TargetText], tokens: int) -> list[list[float]]:
        """By head, the share of positions at which the target's token has rank 0, 1, ... in the head's law."""
        found = torch.zeros(self.heads.count, RANKS)
        seen = torch.zeros(self.heads.count, 1)
        for batch in in_order(texts, tokens):
            for head, (logits, laws) in enumerate(self._outputs(batch)):
                ranks = _ranks(logits, laws.tokens)
                found[head] += torch.bincount(ranks[ranks < RANKS].cpu(), minlength=RANKS)
                seen[head] += len(ranks)
        shares: list[list[float]] = (found / seen.clamp(min=1)).tolist()
        return shares

    def _divergences(self, logits: Tensor, laws: TopLaws) -> dict[str, Tensor]:
        heated = torch.log_softmax(logits / self.temperature, -1)
        return divergences(heated, tempered(laws, self.temperature))

    def _outputs(self, batch: TextBatch) -> Iterator[tuple[Tensor, TopLaws]]:
        """By head, its logits ``[n, V]`` and the target's laws of the same tokens."""
        batch = batch.to(self._target.device)
        with torch.no_grad():
            inner: Any = self._target.base_model
            states = inner(input_ids=batch.ids, use_cache=False).last_hidden_state
        width, states = batch.ids.shape[1], states.reshape(-1, states.shape[-1])
        for head in range(self.heads.count):
            back = head + 1  # from the state that the law was computed at to the one that the head reads
            there = batch.places % width >= back
            at = batch.places[there] - back
            yield self.heads.head_logits(head, states[at]).float(), TopLaws(*(one[there] for one in batch.laws))


def _ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rank of each token in its law, from 0, by falling logit."""
    return (logits > logits.gather(-1, tokens[:, None])).sum(-1)
