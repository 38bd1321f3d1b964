"""Run one model on many texts of different lengths at once, and reuse its KV caches from batch to batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sprinter.models.checks import check_finite
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.interface import Runner
from sprinter.models.pair import LoadedModel

__all__ = ["Batches", "TrainBatch"]

_GRAIN = 64  # cache lengths are rounded up to a multiple of this
_KEPT = 4  # caches kept for reuse


class TrainBatch:
    """Texts, each of its own length, whose prompts are in the KV cache except for the last token.

    Args:
        runner: has one row per prompt.
        prompts: token ids of each prompt.
        vocab: number of logits to keep; those beyond are dropped.
        name: model name for error messages.
    """

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], vocab: int, name: str) -> None:
        self._runner, self._vocab, self._name = runner, vocab, name
        runner.rewind([0] * runner.batch)
        longest = max(len(ids) for ids in prompts) - 1
        if longest > 0:
            # Padding comes last, no token attends to it, and rewinding drops it.
            padded = [[*ids[:-1], *[0] * (longest + 1 - len(ids))] for ids in prompts]
            runner.extend(torch.tensor(padded, device=runner.device), logits=False)
            runner.rewind([len(ids) - 1 for ids in prompts])

    def feed(self, tokens: Tensor, *, logits: bool = True) -> tuple[Tensor | None, Tensor]:
        """Feed ``tokens [rows, n]``; return logits ``[rows, n, vocab]`` (or None) and hidden states ``[rows, n, d]``.

        Raises:
            SprinterError: the logits are not finite.
        """
        begin = min(self._runner.lengths)
        step = self._runner.extend(tokens.to(self._runner.device), logits=logits)
        if step.logits is None:
            return None, step.hidden
        check_finite(step.logits[..., : self._vocab], self._name, begin)
        return step.logits[..., : self._vocab], step.hidden


class Batches:
    """Make batches for one model.

    Args:
        model: any model that has a runner; a model that cannot batch is run row by row.
        vocab: size of the common vocabulary.
        name: "target" or "draft", for messages.
        compile: whether short forward passes are captured, as in ``make_runner``; their bits may differ.
    """

    def __init__(self, model: LoadedModel, vocab: int, name: str, compile: bool | None = False) -> None:
        self.device, self.hidden_size, self.vocab = model.model.device, model.hidden_size, vocab
        self._model, self._name, self._compile = model, name, compile
        self._alone = runner_kind(model.model)[0] == "crop"
        self._runners: OrderedDict[tuple[int, int, int], Runner] = OrderedDict()

    def open(
        self, prompts: Sequence[Sequence[int]], room: int, most: int | None = None
    ) -> Iterator[tuple[slice, TrainBatch]]:
        """Prefill the prompts and yield (slice of the prompts, batch), in order.

        Args:
            prompts: token ids, at least one each.
            room: number of tokens that a row must be able to hold.
            most: rows per batch; a batch is valid until the next one is yielded. None: all batches stay valid.
        """
        size = 1 if self._alone else most or len(prompts)
        for slot, at in enumerate(range(0, len(prompts), max(1, size))):
            part = slice(at, min(at + size, len(prompts)))
            runner = self._runner(0 if most else slot, part.stop - part.start, room)
            yield part, TrainBatch(runner, prompts[part], self.vocab, self._name)

    def _runner(self, slot: int, rows: int, room: int) -> Runner:
        # The results of a batch must depend on its step alone, so that a resumed run gives the same bits: a cache
        # is reused only for exactly its size.
        key = slot, rows, min(-(-room // _GRAIN) * _GRAIN, self._model.context)
        runner = self._runners.pop(key, None) or make_runner(
            self._model.model, batch=rows, max_len=key[2], compile=self._compile
        )
        self._runners[key] = runner
        while len(self._runners) > _KEPT:
            self._runners.popitem(last=False)
        return runner
