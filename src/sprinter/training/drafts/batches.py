"""Batches of texts for training: a pure function of the settings and the step, so that a resumed run sees the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sprinter.training.drafts.data import TargetText
from sprinter.training.drafts.losses import TopLaws

__all__ = ["TextBatch", "collate", "in_order", "orders", "steps_of", "stream"]

_SORTED = 8  # batches whose texts are sorted by length together, so that little of a batch is padding


class TextBatch(NamedTuple):
    """Texts of one step.

    Attributes:
        ids: ``[rows, width]`` token ids, padded on the right; no token attends to what follows it.
        places: ``[n]`` indices into the flattened ``[rows · width]`` of the positions whose laws are trained.
        laws: the target's laws at these positions.
        lengths: number of tokens of each row.
    """

    ids: Tensor
    places: Tensor
    laws: TopLaws
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> TextBatch:
        """The batch on a device."""
        laws = TopLaws(*(one.to(device) for one in self.laws))
        return TextBatch(self.ids.to(device), self.places.to(device), laws, self.lengths)

    def from_token(self, number: int) -> tuple[Tensor, TopLaws]:
        """The places from a token of each text on, counted from 0, and the laws there."""
        there = self.places % self.ids.shape[1] >= number
        return self.places[there], TopLaws(*(one[there] for one in self.laws))


def orders(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of the texts of each batch of an epoch: at most ``tokens`` tokens with padding, or one text."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    span = max(1, _SORTED * tokens * len(lengths) // max(1, sum(lengths)))
    found: list[list[int]] = []
    for at in range(0, len(order), span):
        found += _filled(order[at : at + span].tolist(), lengths, tokens)
    return [found[i] for i in random.permutation(len(found))]


def _filled(indices: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Batches of at most ``tokens`` tokens with padding, or of one text, by rising length."""
    found: list[list[int]] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if not found or lengths[index] * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(index)
    return found


def steps_of(lengths: Sequence[int], tokens: int, seed: int, epochs: float) -> int:
    """Number of steps that ``epochs`` passes over the texts take."""
    whole = sum(len(orders(lengths, tokens, seed, epoch)) for epoch in range(int(epochs)))
    rest = epochs - int(epochs)
    last = round(rest * len(orders(lengths, tokens, seed, int(epochs)))) if rest else 0
    return max(1, whole + last)


def stream(texts: Sequence[TargetText], tokens: int, seed: int, skip: int = 0) -> Iterator[TextBatch]:
    """Yield batches without end, epoch after epoch, the first ``skip`` left out."""
    lengths, epoch = [len(text.ids) for text in texts], 0
    while True:
        found = orders(lengths, tokens, seed, epoch)
        for indices in found[skip:]:
            yield collate([texts[i] for i in indices])
        skip, epoch = max(0, skip - len(found)), epoch + 1


def in_order(texts: Sequence[TargetText], tokens: int) -> Iterator[TextBatch]:
    """Batches of texts of at most ``tokens`` tokens, by rising length."""
    for indices in _filled(range(len(texts)), [len(text.ids) for text in texts], tokens):
        yield collate([texts[i] for i in indices])


def collate(texts: Sequence[TargetText]) -> TextBatch:
    """One batch of texts."""
    width = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    places = []
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = text.ids
        places.append(row * width + torch.arange(text.prompt - 1, len(text.ids) - 1))
    laws = TopLaws(*(torch.cat(parts) for parts in zip(*(text.laws for text in texts), strict=True)))
    return TextBatch(ids, torch.cat(places), laws, tuple(len(text.ids) for text in texts))
