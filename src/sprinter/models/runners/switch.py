"""Rows of a model whose keys are other keys once the text is long: two caches, one on either side of the switch.

The law after a prefix of at most ``switch`` tokens comes of the first cache, of a longer one of the second, which reads
the text from its beginning when a row first crosses. A row that is rewound and crosses again finds both as it left
them. So every law is that of the uncached pass over its own prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import BaseRunner
from sprinter.models.runners.row import Mask, RowRunner, Windows

__all__ = ["FarRunner", "SwitchRunner"]


class FarRunner(RowRunner):
    """A row runner whose every pass is one over a text longer than ``switch`` tokens: where no token of a pass lies
    beyond, one of padding does.

    Args:
        model, batch, max_len, windows: as of the row runner.
        switch: the most tokens of a text that is embedded as short ones are.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, max_len: int, windows: Windows, switch: int
    ) -> None:
        super().__init__(model, batch, max_len, windows)
        self._switch = switch

    def _extend(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, rows: Sequence[int] | None
    ) -> ModelOutput:
        n = tokens.shape[1]
        lengths = self._lengths if rows is None else [self._lengths[row] for row in rows]
        given = [n] * len(lengths) if counts is None else counts
        if not self._falls_short(lengths, given):
            return super()._extend(tokens, counts, logits, rows)
        step = super()._extend(pad(tokens, (0, 1)), given, logits, rows)
        return ModelOutput(None if step.logits is None else step.logits[:, :n], step.hidden[:, :n])

    def _ragged(self, n: int, counts: Sequence[int]) -> tuple[Tensor, Mask]:
        positions, mask = super()._ragged(n, counts)
        if self._falls_short(self._lengths, counts):
            # Only here, not in the mask: a sliding window around it would hold no key.
            positions[:, -1] = self._switch
        return positions, mask

    def _falls_short(self, lengths: Sequence[int], counts: Sequence[int]) -> bool:
        return max(map(sum, zip(lengths, counts, strict=True))) <= self._switch


class SwitchRunner(BaseRunner):
    """See ``Runner``. Rows on both sides of the switch, in any mixture.

    Args:
        near: holds the first tokens of each row, ``near.max_len`` at most: the switch.
        far: holds the whole of long rows.
    """

    name = "row"

    def __init__(self, near: RowRunner, far: FarRunner) -> None:
        super().__init__(far.batch, far.max_len)
        self._near, self._far, self._switch = near, far, near.max_len
        self.model, self.device = far.model, far.device
        self.vocab_size, self.hidden_size = far.vocab_size, far.hidden_size
        self._ids = torch.zeros(far.batch, far.max_len, dtype=torch.long, device=far.device)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Lower the lengths."""
        self._check_rewind(lengths)
        self._lengths = list(lengths)
        self._trim()

    def copy(self, from_row: int, to_rows: Sequence[int]) -> None:
        """Copy tokens, keys and values."""
        self._near.copy(from_row, to_rows)
        self._far.copy(from_row, to_rows)
        self._ids[list(to_rows)] = self._ids[from_row].clone()
        for row in to_rows:
            self._lengths[row] = self._lengths[from_row]

    def wipe(self, row: int) -> None:
        """Wipe both caches; the far one, which reads a row's beginning unasked, forgets all of the row."""
        self._check_rows([row])
        self._trim()
        lengths = self._far.lengths
        lengths[row] = 0
        self._far.rewind(lengths)
        for runner in (self._near, self._far):
            runner.wipe(row)

    def _trim(self) -> None:
        """Neither cache holds more of a row than the row has."""
        for runner in (self._near, self._far):
            runner.rewind([min(pair) for pair in zip(runner.lengths, self._lengths, strict=True)])

    def _step(self, tokens: Tensor, counts: Sequence[int] | None, logits: bool) -> ModelOutput:
        every = range(self.batch)
        return self._step_some(
            tokens, [tokens.shape[1]] * self.batch if counts is None else counts, logits, every
        )

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int]
    ) -> ModelOutput:
        self._trim()  # what a pass left that was interrupted between the two
        starts = [self._lengths[row] for row in rows]
        for row, start, count, own in zip(rows, starts, counts, tokens, strict=True):
            self._ids[row, start : start + count] = own[:count]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        middles = [min(max(start, self._switch), end) for start, end in zip(starts, ends, strict=True)]
        if ends == middles:
            return self._near.extend(tokens, counts, logits=logits, rows=self._some(rows))
        parts = (self._near, starts, middles), (self._far, middles, ends)
        said: Tensor | None = None
        hidden: Tensor | None = None
        for runner, begins, stops in parts:
            live = [i for i in range(len(rows)) if stops[i] > begins[i]]
            if not live:
                continue
            step = self._read(runner, [(rows[i], begins[i], stops[i]) for i in live], logits)
            if hidden is None:
                hidden = step.hidden.new_zeros(*tokens.shape, self.hidden_size)
                said = None if step.logits is None else step.logits.new_zeros(*tokens.shape, self.vocab_size)
            for at, i in enumerate(live):
                place = slice(begins[i] - starts[i], stops[i] - starts[i])
                hidden[i, place] = step.hidden[at, : stops[i] - begins[i]]
                if said is not None and step.logits is not None:
                    said[i, place] = step.logits[at, : stops[i] - begins[i]]
        assert hidden is not None, "a row that ends beyond the switch has read something there"
        return ModelOutput(said, hidden)

    def _read(self, runner: RowRunner, pieces: Sequence[tuple[int, int, int]], logits: bool) -> ModelOutput:
        """Pieces (row, begin, end) of the text, the row's tokens before them first if this cache lacks them."""
        for row, begin, _ in pieces:
            have = runner.lengths[row]
            if have < begin:
                runner.extend(self._ids[row : row + 1, have:begin], logits=False, rows=self._some([row]))
        counts = [end - begin for _, begin, end in pieces]
        feed = self._ids.new_zeros(len(pieces), max(counts))
        for own, (row, begin, end) in zip(feed, pieces, strict=True):
            own[: end - begin] = self._ids[row, begin:end]
        return runner.extend(feed, counts, logits=logits, rows=self._some([row for row, _, _ in pieces]))

    def _some(self, rows: Sequence[int]) -> Sequence[int] | None:
        """None for all rows in order, which need not be gathered."""
        return None if list(rows) == list(range(self.batch)) else rows
