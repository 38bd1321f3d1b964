"""Prefixes: texts of the four classes, written and scored in batches, each token read once by each model.

A row is a prompt and ``new_tokens`` tokens after it: those of the text itself, or written by the draft, the target, or
both by turns (a fair coin a token). The model that writes has thereby scored what it wrote; only the rows that it did
not write are fed to it in one piece. So either model reads every token once, as scoring alone would have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.laws import Sampling, process
from sprinter.models.pair import LoadedPair
from sprinter.random import AddressedDraws, Purpose
from sprinter.training.batches import Batches
from sprinter.training.records import KINDS

__all__ = ["PrefixRow", "PrefixWriter", "Readings"]

ORIGINAL, DRAFT, TARGET, INTERLEAVED = range(len(KINDS))
_AT_ONCE = 16  # rows of one pass where rows need not keep step: by length, so that little is padding


@dataclass(frozen=True, slots=True)
class PrefixRow:
    """A text to be labelled.

    Attributes:
        prompt: index of the text in the input.
        kind: prefix class, index into ``KINDS``.
        ids: token ids of the prompt.
        original: ids that follow it in the text.
    """

    prompt: int
    kind: int
    ids: tuple[int, ...]
    original: tuple[int, ...]

    def draws(self, seed: int) -> AddressedDraws:
        """This row's numbers: no other text or class of the same seed shares them."""
        return AddressedDraws(seed, self.prompt * len(KINDS) + self.kind)


@dataclass(frozen=True, slots=True)
class Readings:
    """What both models said about the new tokens of R rows, N each.

    Attributes:
        tokens: ``[R, N]`` ids, on the CPU.
        q, p: ``[R, N, vocab]``, the draft's and the target's logits for these tokens.
        hidden: ``[R, N + 1, d]``, the draft's states: [:, j] produced the law of token j, [:, j + 1] has read it.
    """

    tokens: Tensor
    q: Tensor
    p: Tensor
    hidden: Tensor


class PrefixWriter:
    """Writes and scores the rows of one step.

    Args:
        models: target and draft.
        seed: of the draws.
        temperature: of the tokens that are written; 0 is greedy.
    """

    def __init__(self, models: LoadedPair, seed: int, temperature: float) -> None:
        assert models.draft is not None, "labelling needs a draft"
        self._seed, self._sampling = seed, Sampling(temperature=temperature)
        self._draft = Batches(models.draft, models.vocab_size, "draft")
        self._target = Batches(models.target, models.vocab_size, "target")

    @torch.inference_mode()
    def __call__(self, rows: Sequence[PrefixRow]) -> Readings:
        """Complete the rows and read them with both models."""
        draft = _Side(self._draft, rows, (DRAFT, INTERLEAVED), Purpose.DRAFT)
        target = _Side(self._target, rows, (TARGET, INTERLEAVED), Purpose.TARGET)
        tokens = self._write(rows, draft, target)
        whole = torch.cat([torch.tensor([row.ids[-1:] for row in rows]), tokens], 1)
        draft.read_rest(whole)
        target.read_rest(whole[:, :-1])  # its state after the last token is not wanted, the draft's is
        return Readings(tokens, draft.logits, target.logits, draft.hidden)

    def _write(self, rows: Sequence[PrefixRow], draft: _Side, target: _Side) -> Tensor:
        """The new tokens ``[R, N]`` of all rows; whoever writes in a row reads it token by token, in step."""
        tokens = torch.tensor([row.original for row in rows])
        draws = [row.draws(self._seed) for row in rows]
        newest = torch.tensor([row.ids[-1] for row in rows])
        for step in range(tokens.shape[1]):
            for side in (draft, target):
                laws = process(side.read(newest), self._sampling).cpu()
                for law, i in zip(laws, side.mine, strict=True):
                    place = len(rows[i].ids) + step
                    if _writer(rows[i].kind, draws[i], place) is side.purpose:
                        tokens[i, step] = draws[i].token(law, 0, place, side.purpose)
            newest = tokens[:, step]
        draft.read(newest)
        return tokens


def _writer(kind: int, draws: AddressedDraws, place: int) -> Purpose:
    """Who writes the token at ``place`` of a row that is written: as a purpose, DRAFT or TARGET."""
    by_draft = kind == DRAFT or (kind == INTERLEAVED and draws.uniform(0, place, Purpose.TRUST) < 0.5)
    return Purpose.DRAFT if by_draft else Purpose.TARGET


class _Side:
    """One model on the rows of a step.

    Attributes:
        mine: rows in which it writes, all or by turns.
        purpose: of its draws.
        logits: ``[R, N, vocab]``.
        hidden: ``[R, N + 1, d]``.
    """

    def __init__(
        self, model: Batches, rows: Sequence[PrefixRow], writes: tuple[int, ...], purpose: Purpose
    ) -> None:
        n = len(rows[0].original)
        self._model, self._step, self.purpose = model, 0, purpose
        self._prompts = [row.ids for row in rows]
        self._room = max(len(ids) for ids in self._prompts) + n + 1
        self.mine = [i for i, row in enumerate(rows) if row.kind in writes]
        self.logits = torch.empty(len(rows), n, model.vocab, device=model.device)
        self.hidden = torch.empty(len(rows), n + 1, model.hidden_size, device=model.device)
        self._held = list(model.open([self._prompts[i] for i in self.mine], self._room))

    def read(self, newest: Tensor) -> Tensor:
        """Feed their newest tokens to my rows; logits ``[mine, vocab]`` of the next ones, none after the last."""
        step, self._step = self._step, self._step + 1
        wanted = step < self.logits.shape[1]
        for part, batch in self._held:
            rows = self.mine[part]
            logits, hidden = batch.feed(newest[rows, None], logits=wanted)
            self.hidden[rows, step] = hidden[:, 0].float()
            if logits is not None:
                self.logits[rows, step] = logits[:, 0].float()
        return self.logits[self.mine, step] if wanted else self.logits[:0, 0]

    def read_rest(self, tokens: Tensor) -> None:
        """Feed ``tokens [R, n]``, all but the prompts' beginnings, to the other rows in one piece."""
        rest = [i for i in range(len(self._prompts)) if i not in self.mine]
        rest.sort(key=lambda i: len(self._prompts[i]))
        prompts, n = [self._prompts[i] for i in rest], self.logits.shape[1]
        for part, batch in self._model.open(prompts, self._room, _AT_ONCE):
            rows = rest[part]
            logits, hidden = batch.feed(tokens[rows])
            assert logits is not None
            self.logits[rows] = logits[:, :n].float()
            self.hidden[rows, : hidden.shape[1]] = hidden.float()
