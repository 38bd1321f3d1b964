"""Batches: one model on many texts at once, of any lengths, its caches used again from batch to batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sprinter.models.checks import check_finite
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.pair import LoadedModel
from sprinter.models.runner import Runner

__all__ = ["Batches", "TrainBatch"]

_GRAIN = 64  # lengths of caches are rounded up to this
_KEPT = 4  # caches that wait for a batch of their size


class TrainBatch:
    """Texts whose prompts have been read but for the last token; each may have its own length.

    Args:
        runner: of as many rows as there are prompts.
        prompts: token ids.
        vocab: logits beyond it are cut off.
        name: of the model, for messages.
    """

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], vocab: int, name: str) -> None:
        self._runner, self._vocab, self._name = runner, vocab, name
        runner.rewind([0] * runner.batch)
        longest = max(len(ids) for ids in prompts) - 1
        if longest > 0:
            # Padding comes last and no token sees it; then it is forgotten.
            padded = [[*ids[:-1], *[0] * (longest + 1 - len(ids))] for ids in prompts]
            runner.extend(torch.tensor(padded, device=runner.device), logits=False)
            runner.rewind([len(ids) - 1 for ids in prompts])

    def feed(self, tokens: Tensor, *, logits: bool = True) -> tuple[Tensor | None, Tensor]:
        """Feed ``tokens [rows, n]``: logits ``[rows, n, vocab]`` or None, hidden states ``[rows, n, d]``.

        Raises:
            SprinterError: logits that are not finite.
        """
        begin = min(self._runner.lengths)
        step = self._runner.extend(tokens.to(self._runner.device), logits=logits)
        if step.logits is None:
            return None, step.hidden
        check_finite(step.logits[..., : self._vocab], self._name, begin)
        return step.logits[..., : self._vocab], step.hidden


class Batches:
    """Makes batches of one model.

    Args:
        model: any that a runner can serve; one that cannot take several rows is run row by row.
        vocab: size of the common vocabulary.
        name: "target" or "draft", for messages.
    """

    def __init__(self, model: LoadedModel, vocab: int, name: str) -> None:
        self.device, self.hidden_size, self.vocab = model.model.device, model.hidden_size, vocab
        self._model, self._name = model, name
        self._alone = runner_kind(model.model)[0] == "crop"
        self._runners: OrderedDict[tuple[int, int, int], Runner] = OrderedDict()

    def open(
        self, prompts: Sequence[Sequence[int]], room: int, most: int | None = None
    ) -> Iterator[tuple[slice, TrainBatch]]:
        """Read the prompts: (which of them, batch), in their order.

        Args:
            prompts: token ids, at least one each.
            room: tokens that a row must be able to hold.
            most: rows a batch, and a batch ends where the next begins; None: all batches stay open.
        """
        size = 1 if self._alone else most or len(prompts)
        for slot, at in enumerate(range(0, len(prompts), max(1, size))):
            part = slice(at, min(at + size, len(prompts)))
            runner = self._runner(0 if most else slot, part.stop - part.start, room)
            yield part, TrainBatch(runner, prompts[part], self.vocab, self._name)

    def _runner(self, slot: int, rows: int, room: int) -> Runner:
        # What a batch computes must depend on its step alone, so that a resumed run gives the same bits: a cache
        # is used again at its very size only.
        key = slot, rows, min(-(-room // _GRAIN) * _GRAIN, self._model.context)
        runner = self._runners.pop(key, None) or make_runner(self._model.model, batch=rows, max_len=key[2])
        self._runners[key] = runner
        while len(self._runners) > _KEPT:
            self._runners.popitem(last=False)
        return runner
