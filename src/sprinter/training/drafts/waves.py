"""Answers of the target written in waves on a GPU: all rows at once, draws and laws where the logits are.

A GPU writes a thousand texts in little more time than one, if no text is handled on its own: rows that have ended wait
for the last one. Draws are addressed as everywhere, so a text is the one that its seed gives in any other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sprinter.laws import Sampling, process, raw_law
from sprinter.models.pair import LoadedModel
from sprinter.random import AddressedDraws, Purpose, addresses, race, race_words
from sprinter.training.batches import Batches, TrainBatch

__all__ = ["WaveText", "WaveWriter"]

_CHECKED = 16
"""Steps between looks at whether all texts have ended, each of which waits for the device."""


class WaveText(NamedTuple):
    """What the target wrote after a prompt.

    Attributes:
        ids: ``[n]`` int64 tokens, the end token included.
        top_ids, top_probs: ``[n, k]`` int64 and float32, the most probable tokens of each raw law.
    """

    ids: Tensor
    top_ids: Tensor
    top_probs: Tensor


class WaveWriter:
    """Writes answers; waves of as many rows share a KV cache.

    Args:
        model: the target. vocab: size of the common vocabulary; logits beyond it are dropped.
        rows: texts of a wave. prompt_tokens, new_tokens: maximum numbers of tokens.
        temperature: of the draws; 0 takes the most probable token.
        top: number of most probable tokens that are kept of each law.
        ends: tokens that end a text; None: the model's.
    """

    def __init__(
        self,
        model: LoadedModel,
        vocab: int,
        *,
        rows: int,
        prompt_tokens: int,
        new_tokens: int,
        temperature: float,
        top: int,
        ends: Sequence[int] | None = None,
    ) -> None:
        self._batches = Batches(model, vocab, "target", compile=model.compile)
        self._rows, self._room, self._new = rows, prompt_tokens + new_tokens, new_tokens
        self._sampling, self._top = Sampling(temperature=temperature), min(top, vocab)
        self._ends = torch.tensor(model.eos_ids if ends is None else tuple(ends), device=self._batches.device)
        self._words = race_words(vocab, self._batches.device)

    @torch.inference_mode()
    def write(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[WaveText]:
        """One answer for each prompt, in their order.

        Args:
            prompts: token ids, at least one each. seeds: of each text.

        Raises:
            SprinterError: the target's logits are not finite.
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little of a wave is padding
        answers: dict[int, WaveText] = {}
        for part, batch in self._batches.open([prompts[i] for i in order], self._room, self._rows):
            own = order[part]
            draws = [AddressedDraws(seeds[i]) for i in own]
            answers |= zip(own, self._wave(batch, [prompts[i] for i in own], draws), strict=True)
        return [answers[i] for i in range(len(prompts))]

    def _wave(
        self, batch: TrainBatch, prompts: Sequence[Sequence[int]], draws: Sequence[AddressedDraws]
    ) -> list[WaveText]:
        device = self._batches.device
        last = torch.tensor([one[-1] for one in prompts], device=device)
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
        # the addresses of tokens of plain decoding, whose rounds have one each
        steps = np.arange(self._new)[:, None]
        keys = addresses(draws, steps + 1, steps + [len(ids) for ids in prompts], Purpose.TARGET)
        low, high = (
            torch.from_numpy(half.astype(np.int64)).to(device)
            for half in (keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32))
        )
        written: list[Tensor] = []
        tops: list[tuple[Tensor, Tensor]] = []
        for step in range(self._new):
            logits, _ = batch.feed(last[:, None])
            assert logits is not None
            values = logits[:, 0].float()
            last = race(process(values, self._sampling), low[step], high[step], self._words)
            probs, ids = raw_law(values).topk(self._top, -1)
            written.append(last)
            tops.append((ids.int(), probs.half()))
            ended |= torch.isin(last, self._ends)
            if step % _CHECKED == _CHECKED - 1 and bool(ended.all()):
                break
        tokens = torch.stack(written, 1).cpu()
        top_ids, top_probs = (torch.stack(each, 1).cpu() for each in zip(*tops, strict=True))
        finished = torch.isin(tokens, self._ends.cpu())
        answers = []
        for row in range(len(prompts)):
            found = finished[row].nonzero()
            n = int(found[0]) + 1 if len(found) else tokens.shape[1]
            # laws are as they are stored, so that a run that resumes trains on the same numbers
            answers.append(
                WaveText(tokens[row, :n].clone(), top_ids[row, :n].long(), top_probs[row, :n].float())
            )
        return answers
