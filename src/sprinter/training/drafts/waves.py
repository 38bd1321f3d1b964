"""Answers of the target written in waves on a GPU: all rows at once, draws and laws where the logits are.

A GPU writes a thousand texts in little more time than one, if no text is handled on its own. So there is no refilling
of rows that have ended, and no seed of each text: a wave has one generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.errors import SprinterError
from sprinter.laws import raw_law
from sprinter.models.choose import make_runner
from sprinter.models.interface import Runner
from sprinter.models.pair import LoadedModel

__all__ = ["WaveText", "WaveWriter"]

_CHECKED = 16
"""Steps between looks at whether all texts have ended, each of which waits for the device."""
_READ = 128
"""Rows whose prompts are read together: the activations of long prompts take more memory than their caches."""


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
    """Writes answers with a runner of its own, which all waves share.

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
        self._runner: Runner = make_runner(
            model.model, batch=rows, max_len=prompt_tokens + new_tokens, compile=model.compile
        )
        self._vocab, self._new, self._temperature, self._top = vocab, new_tokens, temperature, min(top, vocab)
        self._ends = torch.tensor(model.eos_ids if ends is None else tuple(ends), device=self._runner.device)

    def write(self, prompts: Sequence[Sequence[int]], seed: int) -> list[WaveText]:
        """One answer for each prompt, in their order.

        Args:
            prompts: token ids, at least one each.
            seed: of the draws.
        """
        rows, answers = self._runner.batch, dict[int, WaveText]()
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # little of a wave is padding
        chance = torch.Generator(self._runner.device).manual_seed(seed)
        for at in range(0, len(order), rows):
            wave = order[at : at + rows]
            answers |= zip(wave, self._wave([prompts[i] for i in wave], chance), strict=True)
        return [answers[i] for i in range(len(prompts))]

    @torch.inference_mode()
    def _wave(self, prompts: Sequence[Sequence[int]], chance: torch.Generator) -> list[WaveText]:
        runner, missing = self._runner, self._runner.batch - len(prompts)
        device = runner.device
        runner.rewind([0] * runner.batch)
        whole = [*prompts, *([prompts[0][:1]] * missing)]  # rows without a text write one that nobody reads
        before = [len(one) - 1 for one in whole]
        for at in range(0, len(whole), _READ):
            some = range(at, min(at + _READ, len(whole)))
            if width := max(before[row] for row in some):
                padded = torch.zeros(len(some), width, dtype=torch.int64)
                for row in some:
                    padded[row - at, : before[row]] = torch.tensor([*whole[row][:-1]], dtype=torch.int64)
                counts = [before[row] for row in some]
                runner.extend(padded.to(device), counts, logits=False, rows=list(some))
        last = torch.tensor([one[-1] for one in whole], device=device)
        ended = torch.zeros(len(whole), dtype=torch.bool, device=device)
        ended[len(prompts) :] = True
        faulty = torch.zeros_like(ended)
        written: list[Tensor] = []
        tops: list[tuple[Tensor, Tensor]] = []
        for step in range(self._new):
            logits = runner.extend(last[:, None]).logits
            assert logits is not None
            values = logits[:, 0, : self._vocab].float()
            faulty |= ~(ended | torch.isfinite(values.amax(-1)))
            last = self._drawn(values, chance)
            probs, ids = raw_law(values).topk(self._top, -1)
            written.append(last)
            tops.append((ids.int(), probs.half()))
            ended |= torch.isin(last, self._ends)
            if step % _CHECKED == _CHECKED - 1 and bool(ended.all()):
                break
        if bool(faulty.any()):
            raise SprinterError(
                "the target's logits are NaN or infinite in some text: check its weights, and try dtype=float32"
            )
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

    def _drawn(self, logits: Tensor, chance: torch.Generator) -> Tensor:
        """One token for each row, by a race: the least exponential time over its law wins."""
        if self._temperature == 0:
            return logits.argmax(-1)
        law = torch.softmax(logits / self._temperature, -1)
        times = torch.empty_like(law).exponential_(generator=chance)
        return (law / times).argmax(-1)
