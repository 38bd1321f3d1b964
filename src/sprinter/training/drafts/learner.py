"""What ``run_to_end`` trains: a student, or heads that draft. Losses and accuracy of each head, or each step."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.heads.drafting import TokenHeads
from sprinter.training.drafts.batches import TextBatch, in_order
from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.losses import LOSSES, TopLaws, divergences, on_kept, tempered
from sprinter.training.drafts.states import KeptStates, states_of

__all__ = ["RANKS", "HeadLearner", "Learner", "LearnerOutput", "Losses", "draw_matrices"]

RANKS = 10
"""Ranks whose accuracy is measured: those that a tree can name."""


class LearnerOutput(NamedTuple):
    """What a student, a head, or a step says of n tokens.

    Attributes:
        logits: ``[n, k]`` of the tokens that it can draft. laws: the target's of the same tokens.
        penalty: a further loss ``[n]``, which is added as it is; None: none.
    """

    logits: Tensor
    laws: TopLaws
    penalty: Tensor | None = None


class Losses(NamedTuple):
    """Losses of a batch.

    Attributes:
        parts: by name, ``[n]`` each. weights: what each of the n laws weighs ``[n]``; None: all the same.
        penalty: a further loss ``[n]``, which is added as it is; None: none.
    """

    parts: Mapping[str, Tensor]
    weights: Tensor | None = None
    penalty: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """The weighted mean of ``[n]`` values."""
        return values.mean() if self.weights is None else (values * self.weights).sum() / self.weights.sum()


class Learner(ABC):
    """What is trained, and its losses.

    Args:
        module: trained in place. temperature: of both laws in the losses.
        discount: weight of the loss of each further head or step, relative to the one before.
    """

    tops: ClassVar[tuple[int, ...]] = ()
    """Numbers of first choices among which the target's token is looked for on held-out texts."""

    def __init__(self, module: nn.Module, temperature: float, discount: float = 1.0) -> None:
        self.module, self.temperature, self.discount = module, temperature, discount

    @abstractmethod
    def outputs(self, batch: TextBatch) -> Iterator[LearnerOutput]:
        """By head or step, its logits and the target's laws of the same tokens."""

    @abstractmethod
    def decays(self, name: str, value: Tensor) -> bool:
        """Whether weight decay acts on a parameter."""

    @abstractmethod
    def digest(self) -> str:
        """Hash of the shape and of all weights before training, and of what the losses depend on."""

    @property
    def reduced(self) -> tuple[Tensor, int] | None:
        """The tokens that it can draft and the number of all, if these are fewer."""
        return None

    def named(self) -> dict[str, Tensor]:
        """The parameters to train, by name."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def laws(self, out: LearnerOutput) -> tuple[Tensor, TopLaws]:
        """ln q ``[n, V]``, and the target's laws, both at the temperature; a reduced vocabulary as in ``on_kept``."""
        own = torch.log_softmax(out.logits / self.temperature, -1)
        laws = tempered(out.laws, self.temperature)
        return (own, laws) if self.reduced is None else on_kept(own, laws, *self.reduced)

    def ranks(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Rank of each token in its law, from 0, by falling logit."""
        return (logits > logits.gather(-1, tokens[:, None])).sum(-1)

    def losses(self, batch: TextBatch) -> Losses:
        """The losses of ``training.drafts.losses`` at all laws of a batch, each head's weighted by the discount."""
        parts, weights, further = [], [], []
        for head, out in enumerate(self.outputs(batch)):
            parts.append(divergences(*self.laws(out)))
            weights.append(torch.full((len(out.logits),), self.discount**head, device=out.logits.device))
            if out.penalty is not None:
                further.append(out.penalty)
        return Losses(
            {name: torch.cat([one[name] for one in parts]) for name in LOSSES},
            torch.cat(weights) if len(parts) > 1 else None,
            torch.cat(further) if further else None,
        )

    @torch.no_grad()
    def held_out(self, texts: Sequence[TargetText], tokens: int) -> dict[str, float]:
        """Mean losses on texts in batches of ``tokens``, and the share of target tokens among each head's ``tops``."""
        sums: dict[str, float] = {}
        counts: dict[str, int] = {}
        for batch in in_order(texts, tokens):
            for head, out in enumerate(self.outputs(batch), 1):
                found = divergences(*self.laws(out))
                ranks = self.ranks(out.logits, out.laws.tokens.to(out.logits.device)) if self.tops else None
                found |= {
                    f"head{head}_top{top}": (ranks < top).float() for top in self.tops if ranks is not None
                }
                for name, values in found.items():
                    sums[name] = sums.get(name, 0.0) + float(values.sum())
                    counts[name] = counts.get(name, 0) + len(values)
        return {name: value / counts[name] for name, value in sums.items() if counts[name]}


HeadsT = TypeVar("HeadsT", bound=TokenHeads)


class HeadLearner(Learner, Generic[HeadsT]):
    """What all kinds of heads share in training.

    Args:
        heads: fresh; trained in place. target: its weights, frozen.
        discount: as in ``HeadSettings``. temperature: of both laws in the losses.
        steps: of training, ahead of what the target has read; Medusa has a head for each.

    Attributes:
        kept: the target's states of all texts, from disk; None: each batch has them computed.
    """

    tops = (1, 5)

    def __init__(
        self, heads: HeadsT, target: PreTrainedModel, discount: float, temperature: float, steps: int = 1
    ) -> None:
        super().__init__(heads, temperature, discount)
        self.heads, self.target, self.steps = heads, target, steps
        self.kept: KeptStates | None = None
        target.requires_grad_(False)

    def decays(self, name: str, value: Tensor) -> bool:
        """All matrices."""
        return value.ndim == 2

    @property
    def about(self) -> tuple[object, ...]:
        """How it is trained: part of the digest."""
        return self.discount, self.steps

    def digest(self) -> str:
        """Hash of the heads, and of how they are trained."""
        found = self.heads.fingerprint
        for fact in self.about:
            found = hashlib.sha256(f"{found}{fact}".encode()).hexdigest()
        return found

    def states(self, batch: TextBatch) -> list[Tensor]:
        """The target's states ``[rows, width, d]`` of each layer that the heads read, on the target's device."""
        device = self.target.device
        if self.kept is None:
            return states_of(self.target, self.heads.layers, batch.ids.to(device))
        return [one.to(device) for one in self.kept.of(batch)]

    @torch.no_grad()
    def accuracies(self, texts: Sequence[TargetText], tokens: int) -> list[list[float]]:
        """By head, the share of positions at which the target's token has rank 0, 1, ... in the head's law."""
        found: list[Tensor] = []
        seen: list[int] = []
        for batch in in_order(texts, tokens):
            for head, out in enumerate(self.outputs(batch)):
                ranks = self.ranks(out.logits, out.laws.tokens.to(out.logits.device)).cpu()
                if head == len(found):
                    found.append(torch.zeros(RANKS))
                    seen.append(0)
                found[head] += torch.bincount(ranks[ranks < RANKS], minlength=RANKS)
                seen[head] += len(ranks)
        return [(counts / max(1, n)).tolist() for counts, n in zip(found, seen, strict=True)]


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
