"""Rows of a model whose rotary embedding changes at a text length, the switch: two caches, one for each side.

The law after a prefix of at most ``switch`` tokens comes from the first cache. The law after a longer prefix comes from
the second, which reads the text from its beginning when a row first crosses the switch. A row that is rewound and
crosses again finds both caches as it left them. So every law equals that of an uncached forward pass over its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import BaseRunner, map_output
from sprinter.models.runners.row import Mask, RowRunner, Windows
from sprinter.models.runners.tree import RowTree

__all__ = ["FarRunner", "SwitchRunner"]


class FarRunner(RowRunner):
    """A row runner that embeds every text as one of more than ``switch`` tokens.

    If no token of a forward pass is beyond the switch, a padding token is placed there.

    Args:
        model, batch, max_len, windows: see ``RowRunner``.
        switch: maximum length of a text that is embedded like a short one.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, max_len: int, windows: Windows, switch: int
    ) -> None:
        super().__init__(model, batch, max_len, windows)
        self._switch = switch

    branches = False  # the padding token beyond the switch cannot be part of a tree

    def _extend(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None,
        logits: bool,
        rows: Sequence[int] | None,
        layers: Sequence[int],
        trees: Sequence[RowTree | None] | None,
    ) -> ModelOutput:
        n = tokens.shape[1]
        lengths = self._lengths if rows is None else [self._lengths[row] for row in rows]
        given = [n] * len(lengths) if counts is None else counts
        if not self._falls_short(lengths, given):
            return super()._extend(tokens, counts, logits, rows, layers, trees)
        step = super()._extend(pad(tokens, (0, 1)), given, logits, rows, layers, trees)
        return map_output(step, lambda x: x[:, :n])

    def _ragged(self, n: int, counts: Sequence[int]) -> tuple[Tensor, Mask]:
        positions, mask = super()._ragged(n, counts)
        if self._falls_short(self._lengths, counts):
            # Only the position, not the mask: a sliding window around it would hold no key.
            positions[:, -1] = self._switch
        return positions, mask

    def _falls_short(self, lengths: Sequence[int], counts: Sequence[int]) -> bool:
        return max(map(sum, zip(lengths, counts, strict=True))) <= self._switch


class SwitchRunner(BaseRunner):
    """See ``Runner``. Rows may be on both sides of the switch, in any mixture.

    Args:
        near: holds the first tokens of each row, at most ``near.max_len``, which is the switch.
        far: holds all tokens of long rows.
    """

    name = "row"

    def __init__(self, near: RowRunner, far: FarRunner) -> None:
        super().__init__(far.batch, far.max_len)
        self._near, self._far, self._switch = near, far, near.max_len
        self.model, self.device = far.model, far.device
        self.vocab_size, self.hidden_size = far.vocab_size, far.hidden_size
        self._ids = torch.zeros(far.batch, far.max_len, dtype=torch.long, device=far.device)

    @property
    def cache_bytes(self) -> int:
        """Size of both caches."""
        return self._near.cache_bytes + self._far.cache_bytes

    def rewind(self, lengths: Sequence[int]) -> None:
        """Lower the lengths."""
        self._check_rewind(lengths)
        self._set_lengths(lengths)
        self._trim()

    def copy(self, from_row: int, to_rows: Sequence[int], length: int | None = None) -> None:
        """Copy tokens, keys and values."""
        length = self._check_copy(from_row, to_rows, length)
        for runner in (self._near, self._far):
            runner.copy(from_row, to_rows, min(length, runner.lengths[from_row]))
        self._ids[list(to_rows)] = self._ids[from_row].clone()
        self._copy_length(from_row, to_rows, length)

    def _adopt(self, other: SwitchRunner, length: int) -> None:
        for own, given in ((self._near, other._near), (self._far, other._far)):
            own.rewind([0, *own.lengths[1:]])
            adopted = own.adopt(given, min(length, given.lengths[0]))
            assert adopted, "runners of one model are of the same kinds"
        self._ids[0, :length] = other._ids[0, :length]

    def renew(self, row: int) -> None:
        """The far cache forgets a row that ends before the switch: it will be read in the same chunks as any text."""
        self._trim()
        self._near.renew(row)
        if self._lengths[row] <= self._switch:
            lengths = self._far.lengths
            lengths[row] = 0
            self._far.rewind(lengths)

    def wipe(self, row: int) -> None:
        """Wipe both caches. The far one forgets the whole row: it reads the beginning again by itself."""
        self._check_rows([row])
        self._trim()
        lengths = self._far.lengths
        lengths[row] = 0
        self._far.rewind(lengths)
        for runner in (self._near, self._far):
            runner.wipe(row)

    def _trim(self) -> None:
        """Rewind both caches to at most the rows' lengths."""
        for runner in (self._near, self._far):
            runner.rewind([min(pair) for pair in zip(runner.lengths, self._lengths, strict=True)])

    def _check_layers(self, layers: Sequence[int]) -> tuple[int, ...]:
        return self._far._check_layers(layers)

    def _step(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, layers: Sequence[int]
    ) -> ModelOutput:
        every = [tokens.shape[1]] * self.batch if counts is None else counts
        return self._step_some(tokens, every, logits, range(self.batch), layers)

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int], layers: Sequence[int]
    ) -> ModelOutput:
        self._trim()  # an interrupted forward pass may have extended one of the two
        starts = [self._lengths[row] for row in rows]
        for row, start, count, own in zip(rows, starts, counts, tokens, strict=True):
            self._ids[row, start : start + count] = own[:count]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        middles = [min(max(start, self._switch), end) for start, end in zip(starts, ends, strict=True)]
        if ends == middles:
            return self._near.extend(
                tokens, counts, logits=logits, rows=self._some(rows), hidden_layers=layers
            )
        parts = (self._near, starts, middles), (self._far, middles, ends)
        made: ModelOutput | None = None
        for runner, begins, stops in parts:
            live = [i for i in range(len(rows)) if stops[i] > begins[i]]
            if not live:
                continue
            step = self._read(runner, [(rows[i], begins[i], stops[i]) for i in live], logits, layers)
            if made is None:
                made = map_output(step, lambda x: x.new_zeros(*tokens.shape, x.shape[-1]))
            for own, part in zip(_tensors(made), _tensors(step), strict=True):
                for at, i in enumerate(live):
                    own[i, begins[i] - starts[i] : stops[i] - starts[i]] = part[at, : stops[i] - begins[i]]
        assert made is not None, "a row that ends beyond the switch has read something there"
        return made

    def _read(
        self,
        runner: RowRunner,
        spans: Sequence[tuple[int, int, int]],
        logits: bool,
        layers: Sequence[int],
    ) -> ModelOutput:
        """Read spans (row, begin, end) of the text, after the row's earlier tokens if this cache lacks them."""
        for row, begin, _ in spans:
            have = runner.lengths[row]
            if have < begin:
                runner.extend(self._ids[row : row + 1, have:begin], logits=False, rows=self._some([row]))
        counts = [end - begin for _, begin, end in spans]
        feed = self._ids.new_zeros(len(spans), max(counts))
        for own, (row, begin, end) in zip(feed, spans, strict=True):
            own[: end - begin] = self._ids[row, begin:end]
        live = self._some([row for row, _, _ in spans])
        return runner.extend(feed, counts, logits=logits, rows=live, hidden_layers=layers)

    def _some(self, rows: Sequence[int]) -> Sequence[int] | None:
        """The rows, or None if they are all rows in order, which need not be gathered."""
        return None if list(rows) == list(range(self.batch)) else rows


def _tensors(step: ModelOutput) -> list[Tensor]:
    return [step.hidden, *step.layers, *([] if step.logits is None else [step.logits])]
