"""A draft whose vocabulary is not the target's: its law on the tokens that both know, in the target's ids.

The draft reads each of the target's tokens in its own (``common_tokens``). Its law is restricted to the common tokens
and renormalised; all others have a draft probability of 0. Tokens are accepted by this law, so exact methods keep the
target's, and a token that the draft lacks is written when the target draws it (token-level intersection: Timor et al.
2025, arXiv 2502.05202).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import exactness, make_runner, reads_trees, runner_kind, tree_leaves
from sprinter.models.common_tokens import CommonTokens
from sprinter.models.interface import ModelOutput, Runner, ServedModel
from sprinter.models.memory import token_bytes
from sprinter.models.runners.forward import BaseRunner, Pass, map_output
from sprinter.models.runners.tree import RowTree

__all__ = ["TranslatedModel", "TranslatedRunner"]

_OUTSIDE = -1e4
"""Logit of tokens that the draft lacks; exp of its distance from any other logit is 0, and float16 can hold it."""
_LONGER, _MORE = 1.5, 16
"""Room of the draft's rows: its own tokens for each of the target's, and further ones."""
_log = logging.getLogger("sprinter")


class TranslatedModel(ServedModel):
    """A draft in the target's ids; see ``ServedModel``.

    Attributes:
        inner: the draft itself. common: ``[c]`` int64, the target's ids of tokens that both know, ascending.
        inner_common: ``[c]`` int64, the draft's ids of the same tokens.

    Args:
        inner: the draft. name, context, hidden_size, compile, weights, size: as in ``LoadedModel``.
        tokens: what it has in common with the target.
        vocab_size: last axis of the target's logits. eos_ids: its EOS ids.
    """

    runner = "translated"

    def __init__(
        self, inner: PreTrainedModel | ServedModel, name: str, tokens: CommonTokens, *, eos_ids: tuple[int, ...],
        vocab_size: int, context: int, hidden_size: int, compile: bool | None, weights: str, size: int,
    ) -> None:  # fmt: skip
        self.inner, self.name, self.tokens, self._compile = inner, name, tokens, compile
        self.weights, self.size, self.vocab_size, self.eos_ids = weights, size, vocab_size, eos_ids
        self.context, self.hidden_size = context, hidden_size
        pairs = torch.tensor(sorted(tokens.ids.items()), dtype=torch.int64, device=inner.device)
        self.common, self.inner_common = pairs.reshape(-1, 2).unbind(1)
        self.config, self.device, self.dtype = inner.config, inner.device, inner.dtype
        self.on_gpu = inner.on_gpu if isinstance(inner, ServedModel) else inner.device.type == "cuda"
        self.exactness, self.fingerprint = exactness(inner), weights_fingerprint(inner)
        self.token_bytes = int(_LONGER * token_bytes(inner))
        self.reason = f"{runner_kind(inner)[1]}; {len(tokens.ids):,} tokens in common with the target"

    def most_leaves(self, rows: int) -> int | None:
        """As the draft's runner."""
        return tree_leaves(self.inner, rows) if reads_trees(self.inner) else 1

    def make_runner(self, batch: int, max_len: int, leaves: int) -> Runner:
        """See ``ServedModel``; rows have room for longer texts, and never more than the draft's context."""
        room = min(int(_LONGER * max_len) + _MORE, max(self.context, max_len))
        inner = make_runner(self.inner, batch=batch, max_len=room, compile=self._compile, leaves=leaves)
        return TranslatedRunner(self, inner, max_len)

    @torch.inference_mode()
    def step_s(self, ids: Sequence[int], repeats: int = 9) -> tuple[float, float]:
        """Median seconds of a step after the target's tokens ``ids``, and of the draft's own pass within it."""
        runner = TranslatedRunner(self, make_runner(self.inner, max_len=2 * len(ids) + _MORE), len(ids) + 1)
        runner.extend(torch.tensor([ids]), logits=False)
        token = next(iter(self.tokens.ids))
        runs = (runner, len(ids), token), (runner.inner, runner.inner.lengths[0], self.tokens.ids[token])
        found: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            for seconds, (one, length, step) in zip(found, runs, strict=True):
                begun = time.perf_counter()
                one.extend(torch.tensor([[step]], device=one.device))
                seconds.append(time.perf_counter() - begun)
                one.rewind([length])
        return median(found[0]), median(found[1])


class TranslatedRunner(BaseRunner):
    """Rows of the target's tokens over rows of the draft's.

    A text that is longer than the draft's rows in its tokens is read no further: from there on its law is uniform over
    the common tokens, which ends no text and changes no exact method's law.
    """

    name = "translated"

    def __init__(self, model: TranslatedModel, inner: Runner, max_len: int) -> None:
        super().__init__(inner.batch, max_len)
        self.model, self.inner, self.device = model, inner, inner.device
        self.vocab_size, self.hidden_size = model.vocab_size, inner.hidden_size
        self.branches, self.leaves, self.may_hold_nan = inner.branches, inner.leaves, inner.may_hold_nan
        self._ends: list[list[int]] = [[] for _ in range(inner.batch)]
        """For each slot of a row, the number of the draft's tokens up to it; more than there is room for: unread."""

    @property
    def cache_bytes(self) -> int:
        """Of the draft's rows."""
        return self.inner.cache_bytes

    def _inner_length(self, row: int, length: int) -> int:
        """Number of the draft's tokens that the first slots of a row have been read as."""
        ends = self._ends[row]
        while length and ends[length - 1] > self.inner.max_len:
            length -= 1
        return ends[length - 1] if length else 0

    def _drop(self, lengths: Sequence[int]) -> None:
        self.inner.rewind([self._inner_length(row, length) for row, length in enumerate(lengths)])
        for ends, length in zip(self._ends, lengths, strict=True):
            del ends[length:]

    def _copy(self, from_row: int, row: int, length: int) -> None:
        self.inner.copy(from_row, [row], self._inner_length(from_row, length))
        self._ends[row] = self._ends[from_row][:length]

    def adopt(self, other: Runner, length: int) -> bool:
        """See ``Runner``."""
        if not isinstance(other, TranslatedRunner):
            return False
        return self.inner.adopt(other.inner, other._inner_length(0, length)) and super().adopt(other, length)

    def _adopt(self, other: TranslatedRunner, length: int) -> None:
        self._ends[0] = other._ends[0][:length]

    def wipe(self, row: int) -> None:
        """See ``Runner``."""
        self.inner.wipe(row)

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        ends, starts = self._ends[row], [0, *self._ends[row]]
        parts = [range(starts[slot], ends[slot]) for slot in path if ends[slot] <= self.inner.max_len]
        self.inner.commit_path(row, [slot for part in parts for slot in part])
        before = self._inner_length(row, root)
        lengths = [ends[slot] - starts[slot] for slot in path]
        ends[root : root + len(path)] = [before + more for more in accumulate(lengths)]

    def _step(self, asked: Pass) -> ModelOutput:
        every = asked.trees or [None] * len(asked.rows)
        each = [
            self._read_as(row, asked.tokens[i, :count].tolist(), every[i])
            for i, (row, count) in enumerate(zip(asked.rows, asked.counts, strict=True))
        ]
        counts = [len(one.ids) for one in each]
        given = torch.zeros(len(each), max(1, *counts), dtype=torch.int64)
        last = torch.zeros(asked.tokens.shape, dtype=torch.int64)
        for i, one in enumerate(each):
            given[i, : counts[i]] = torch.tensor(one.ids, dtype=torch.int64)
            last[i, : len(one.last)] = torch.tensor(one.last, dtype=torch.int64)
        step = self.inner.extend(
            given.to(self.device), counts, logits=asked.logits, rows=asked.rows, hidden_layers=asked.layers,
            parents=None if asked.trees is None else [one.parents for one in each],
        )  # fmt: skip
        for row, one in zip(asked.rows, each, strict=True):
            self._ends[row] += one.ends
        if step.logits is None and step.hidden.shape[1] < given.shape[1]:
            return step  # a prefill without states
        last = last.to(self.device)
        found = map_output(step, lambda states: _taken(states, last.clamp(min=0)))
        if found.logits is None:
            return found
        known = found.logits[..., self.model.inner_common].masked_fill_((last < 0)[:, :, None], 0)
        logits = known.new_full((*last.shape, self.vocab_size), _OUTSIDE)
        logits[..., self.model.common] = known
        return found._replace(logits=logits)

    def _read_as(self, row: int, tokens: Sequence[int], tree: RowTree | None) -> _ReadTokens:
        """What a row's next tokens are read as."""
        ends, room = list(self._ends[row]), self.inner.max_len
        read = _ReadTokens([], [], [], None if tree is None else [])
        length = begun = self.inner.lengths[row]
        for token in tokens:
            own = self.model.tokens.read_as(token)
            own = own if ends else (*self.model.tokens.first, *own)
            if (ends and ends[-1] > room) or length + len(own) > room:
                _say_full(self.model.name)
                read.last.append(-1)
                ends.append(room + 1)
                continue
            if tree is not None and read.parents is not None:
                above = tree.parents[len(ends) - tree.root]
                before = ends[above] if above >= 0 else 0
                read.parents.extend((before - 1, *range(length, length + len(own) - 1)))
            length += len(own)
            read.ids.extend(own)
            ends.append(length)
            read.last.append(length - begun - 1)
        read.ends.extend(ends[len(self._ends[row]) :])
        return read


class _ReadTokens(NamedTuple):
    """Tokens of the target in the draft's.

    Attributes:
        ids: the draft's tokens. ends: for each of the target's, as ``TranslatedRunner._ends``.
        last: its place in ``ids``, -1 if it is not read. parents: of each of ``ids``, in the draft's slots.
    """

    ids: list[int]
    ends: list[int]
    last: list[int]
    parents: list[int] | None


def _taken(states: Tensor, places: Tensor) -> Tensor:
    """``[rows, m, d]`` at places ``[rows, n]``: ``[rows, n, d]``."""
    return states.gather(1, places[:, :, None].expand(-1, -1, states.shape[-1]))


@cache
def _say_full(name: str) -> None:
    _log.warning(
        "a text is longer than the context of the draft %s in its own tokens: it drafts no further there, which is "
        "slower (this is said once)", name,
    )  # fmt: skip
