"""Heads that draft as ``run_to_end`` trains them: losses and accuracy of each head, or each step."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.heads.drafting import TokenHeads
from sprinter.training.drafts.batches import TextBatch
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.losses import LOSSES, TopLaws, divergences, tempered
from sprinter.training.drafts.run import Losses
from sprinter.training.drafts.states import KeptStates, states_of
from sprinter.training.drafts.train import in_order

__all__ = ["RANKS", "HeadLearner", "HeadOutput", "draw_matrices"]

RANKS = 10
"""Ranks whose accuracy is measured: those that a tree can name."""
_TOPS = (1, 5)


class HeadOutput(NamedTuple):
    """What a head, or a step, says of n tokens.

    Attributes:
        logits: ``[n, k]`` of the tokens that it can draft. laws: the target's of the same tokens.
        penalty: a further loss ``[n]``, which is added as it is; None: none.
    """

    logits: Tensor
    laws: TopLaws
    penalty: Tensor | None = None


@torch.no_grad()
def draw_matrices(module: nn.Module, seed: int) -> None:
    """Fill all matrices of a module by normal numbers of standard deviation 0.02, one after the other by name, and
    biases by 0."""
    chance = torch.Generator().manual_seed(seed)
    for name, value in sorted(module.named_parameters()):
        if value.ndim == 2:
            value.copy_(torch.empty(value.shape).normal_(0.0, 0.02, generator=chance))
        elif name.endswith("bias"):
            value.zero_()


class HeadLearner(ABC):
    """What both kinds of heads share in training.

    Args:
        heads: fresh; trained in place. target: its weights, frozen.
        discount: as in ``HeadSettings``. temperature: of both laws in the losses.

    Attributes:
        kept: the target's states of all texts, from disk; None: each batch has them computed.
    """

    def __init__(
        self, heads: TokenHeads, target: PreTrainedModel, discount: float, temperature: float
    ) -> None:
        self.heads, self.target, self.temperature = heads, target, temperature
        self._discount = discount
        self.kept: KeptStates | None = None
        target.requires_grad_(False)

    @abstractmethod
    def outputs(self, batch: TextBatch) -> Iterator[HeadOutput]:
        """By head or step, logits ``[n, ...]`` and the target's laws of the same tokens."""

    def states(self, batch: TextBatch) -> list[Tensor]:
        """The target's states ``[rows, width, d]`` of each layer that the heads read, on the target's device."""
        device = self.target.device
        if self.kept is None:
            return states_of(self.target, self.heads.layers, batch.ids.to(device))
        return [one.to(device) for one in self.kept.of(batch)]

    @abstractmethod
    def decays(self, name: str, value: Tensor) -> bool:
        """Whether weight decay acts on a parameter."""

    def divergences(self, logits: Tensor, laws: TopLaws) -> dict[str, Tensor]:
        """The losses of logits over the vocabulary."""
        heated = torch.log_softmax(logits / self.temperature, -1)
        return divergences(heated, tempered(laws, self.temperature))

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Rank of each token in its law, from 0, by falling logit."""
        return (logits > logits.gather(-1, tokens[:, None])).sum(-1)

    def named(self) -> dict[str, Tensor]:
        """All parameters of the heads."""
        return dict(self.heads.named_parameters())

    def training(self, on: bool) -> None:
        """Go to training or evaluation mode."""
        self.heads.train(on)

    def digest(self) -> str:
        """Hash of the heads, and of how they are trained."""
        return hashlib.sha256(f"{self.heads.fingerprint}{self._discount}".encode()).hexdigest()

    def losses(self, batch: TextBatch) -> Losses:
        """The losses of all heads, each head's weighted by the discount."""
        parts, weights, further = [], [], []
        for head, out in enumerate(self.outputs(batch)):
            parts.append(self.divergences(out.logits, out.laws))
            weights.append(torch.full((len(out.logits),), self._discount**head, device=out.logits.device))
            if out.penalty is not None:
                further.append(out.penalty)
        return Losses(
            {name: torch.cat([one[name] for one in parts]) for name in LOSSES},
            torch.cat(weights),
            torch.cat(further) if further else None,
        )

    @torch.no_grad()
    def held_out(self, texts: Sequence[TargetText], tokens: int) -> dict[str, float]:
        """Mean losses over all heads, and the share of tokens among each head's first ones (``head1_top5``)."""
        sums: dict[str, float] = dict.fromkeys(LOSSES, 0.0)
        counts: dict[str, int] = dict.fromkeys(LOSSES, 0)

        def add(name: str, values: Tensor) -> None:
            sums[name] = sums.get(name, 0.0) + float(values.sum())
            counts[name] = counts.get(name, 0) + len(values)

        for batch in in_order(texts, tokens):
            for head, (logits, laws, _) in enumerate(self.outputs(batch)):
                for name, values in self.divergences(logits, laws).items():
                    add(name, values)
                ranks = self.ranks(logits, laws.tokens.to(logits.device))
                for top in _TOPS:
                    add(f"head{head + 1}_top{top}", (ranks < top).float())
        return {name: value / counts[name] for name, value in sums.items() if counts[name]}

    @torch.no_grad()
    def accuracies(self, texts: Sequence[TargetText], tokens: int) -> list[list[float]]:
        """By head, the share of positions at which the target's token has rank 0, 1, ... in the head's law."""
        found: list[Tensor] = []
        seen: list[int] = []
        for batch in in_order(texts, tokens):
            for head, (logits, laws, _) in enumerate(self.outputs(batch)):
                ranks = self.ranks(logits, laws.tokens.to(logits.device)).cpu()
                counts = torch.bincount(ranks[ranks < RANKS], minlength=RANKS)
                if head == len(found):
                    found.append(torch.zeros(RANKS))
                    seen.append(0)
                found[head] += counts
                seen[head] += len(ranks)
        return [(counts / max(1, n)).tolist() for counts, n in zip(found, seen, strict=True)]
