"""The row runner: preallocated rows with a length each; a rewind lowers a length.

Serves transformers models whose layers attend to the whole past or to a sliding window, and that accept a mask. K and V
are written at each row's own positions into ``[batch, heads, max_len, d]`` buffers, and the model is called with
explicit position ids and a mask from the lengths.

A mask is ``[1 or batch, 1, n, keys]``, in one of two forms: bool (True = visible) for scaled_dot_product_attention, and
additive in the model's dtype (0 = visible) for transformers' eager attention, which adds it to the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import ModelRunner, Pass, map_output, turn
from sprinter.models.runners.tree import RowTree, tree_places

__all__ = ["BOOLEAN", "RowCache", "RowLayer", "RowPlaces", "RowRunner", "Span", "Windows", "masks_of"]

BOOLEAN = ("sdpa",)
"""Implementations of attention that take bool masks."""
Windows = dict[str, int | None]
"""Layer type → sliding window (None: the whole past). A single key "": one mask serves all layers."""
Mask = Tensor | dict[str, Tensor | None] | None

_SHORT = 8  # tokens of a row up to which a pass may read padding in rows that do not take part
_FEW = 7  # rows that take part for each of those, at the least


class RowPlaces(NamedTuple):
    """Where the tokens of a pass are, and what they see.

    Attributes:
        positions: ``[rows, n]``, position ids.
        slots: ``[rows, n]``, where keys and values are written; padding has the spare slot, which nobody sees.
        rows: ``[rows]``, their numbers.
        keys: ``[k]``, 0, 1, ..., k − 1: the visible keys; a query at position t sees those up to t. With trees
            ``[rows, n, k]``: each key's position for each query, ``NOWHERE`` if the query must not see it.
    """

    positions: Tensor
    slots: Tensor
    rows: Tensor
    keys: Tensor


class RowRunner(ModelRunner):
    """See ``Runner``. Any batch, ragged rows, trees, rewind in constant time.

    Args:
        model: a model for which ``choose.runner_kind`` gives "row".
        batch: number of rows.
        max_len: maximum number of tokens in a row; buffers of that size are allocated at the first forward pass.
        windows: the masks that the model's layers need, see ``Windows``.
        flat: whether its layers can read the tokens of all rows in one line (``models.kernels``), so that a
            forward pass over rows of different lengths costs nothing for padding.
        dtype: of keys and values; None: that of the model.
    """

    name = "row"
    branches = True

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_len: int,
        windows: Windows,
        flat: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, batch, max_len)
        self._cache = RowCache(batch, max_len, dtype)
        self._windows = windows
        self._sdpa = model.config._attn_implementation in BOOLEAN
        self._mask_dtype = mask_dtype(model)
        self._positions = torch.arange(max_len, device=self.device)[None]
        self._numbers = torch.arange(batch, device=self.device)
        self._takes_flat = flat

    @property
    def cache_bytes(self) -> int:
        """Size of the buffers; 0 before the first forward pass."""
        return self._cache.nbytes

    def _copy(self, from_row: int, row: int, length: int) -> None:
        for buffer in self._cache.buffers():
            buffer[row, :, :length] = buffer[from_row, :, :length]

    def _adopt(self, other: RowRunner, length: int) -> None:
        self._cache.make_like(other._cache)
        for own, given in zip(self._cache.buffers(), other._cache.buffers(), strict=True):
            own[:1, :, :length] = given[:1, :, :length]

    def wipe(self, row: int) -> None:
        """Zero the keys and values beyond the row's length."""
        self._check_rows([row])
        with torch.inference_mode():
            for buffer in self._cache.buffers():
                buffer[row, :, self._lengths[row] :].zero_()

    def _compact(self, row: int, path: Sequence[int], root: int) -> None:
        if list(path) != list(range(root, root + len(path))):
            with torch.inference_mode():
                for buffer in self._cache.buffers():
                    buffer[row, :, root : root + len(path)] = buffer[row][:, list(path)]

    def drafts(self, longest: int, row: int = 0) -> bool:
        """Whether ``draft`` can write a text of so many tokens in a row: our kernels run the model, and each query sees
        the whole text."""
        seen = all(window is None or longest <= window for window in self._windows.values())
        chain = row not in self._trees
        fits = seen and chain and longest <= self.max_len
        return fits and self.straight is not None and self.straight.drafts

    def draft(
        self,
        first: Tensor,
        states: Tensor,
        rows: Sequence[int],
        counts: Sequence[int],
        temperatures: Sequence[float],
        truncations: Sequence[tuple[int, float, float]],
        keys: np.ndarray | Sequence[Sequence[int]],
        words: tuple[np.ndarray, np.ndarray],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw tokens after some rows, each from the law that the ones before it give; the last ones are not read.

        Args:
            first, states: logits ``[rows, V]`` after the texts, of which laws are made, and states ``[rows, d]``.
            rows, counts: rows and numbers of tokens, in falling order of these.
            temperatures, truncations: of the laws, the latter as ``laws.truncation`` has them.
            keys: ``[rows][most tokens]``, addresses of the draws, and words of the tokens, as ``sprinter.random`` has
                them (``word_blocks``).

        Returns:
            Logits, states, laws ``[steps, rows, ...]`` and tokens ``[steps, rows]``, undefined beyond a row's count.
        """
        assert self.straight is not None
        starts = [self._lengths[row] for row in rows]
        with turn(self._head):
            made = self.straight.draft(
                first, states, self._cache, rows=rows, starts=starts, counts=counts, temperatures=temperatures,
                truncations=truncations, keys=keys, words=words,
            )  # fmt: skip
        for row, start, count in zip(rows, starts, counts, strict=True):
            self._lengths[row] = start + count - 1
        return made

    def _step(self, asked: Pass) -> ModelOutput:
        if self._takes_flat and not asked.branches and 0 < sum(asked.counts) <= 0.9 * asked.tokens.numel():
            return self._flat(asked)
        if self._are_most(asked):
            step = self._through(every := self._widened(asked), self._places(every))
            return map_output(step, lambda x: x[torch.tensor(asked.rows, device=x.device)])
        return self._through(asked, self._places(asked))

    def _flat(self, asked: Pass) -> ModelOutput:
        """The tokens of all rows in one line, without padding, whose outputs are zeros."""
        n = asked.tokens.shape[1]
        starts, given = torch.tensor([asked.starts, asked.counts], device=self.device)
        each = torch.arange(n, device=self.device)
        real = each < given[:, None]
        positions = (starts[:, None] + each)[real][None]
        rows = torch.tensor(asked.rows, device=self.device)[:, None].expand(-1, n)[real]
        at = RowPlaces(positions, positions, rows, self._positions[0, : int(positions.max()) + 1])
        step = self._through(asked._replace(tokens=asked.tokens[real][None]), at, flat=True)
        made = map_output(step._replace(logits=None), lambda states: _spread(states[0], real))
        if step.logits is None:
            return made
        return made._replace(logits=step.logits[0] if asked.line else _spread(step.logits[0], real))

    def _through(self, asked: Pass, at: RowPlaces, flat: bool = False) -> ModelOutput:
        aligned, keys = asked.aligned and not flat, at.keys.shape[-1]
        span, positions = self._cache.span, at.positions[:1] if aligned else at.positions
        span.start, span.keys = 0 if asked.branches else max(asked.starts), keys
        span.flat, span.some, span.index, span.rows = flat, flat or not asked.whole, None, None
        if not aligned:
            span.index, span.rows = at.slots, at.rows[None] if flat else at.rows[:, None]
        # Fused attention needs no mask for one query that sees all keys, nor at the start of the text.
        bare = aligned and self._sdpa and (asked.tokens.shape[1] == 1 or span.start == 0)

        def mask(window: int | None) -> Tensor | None:
            if bare and (window is None or keys <= window):
                return None
            return window_mask(at.keys, positions, window, self._mask_dtype)

        return self._call(
            asked, position_ids=at.positions, attention_mask=masks_of(self._windows, mask), cache=self._cache
        )

    def _are_most(self, asked: Pass) -> bool:
        """Whether few rows are missing in a short pass, none of them longer than the others: attention would have to
        copy the keys of all others, and these read padding at less cost."""
        missing = self.batch - len(asked.rows)
        if not missing or asked.branches or self._takes_flat or asked.tokens.shape[1] > _SHORT:
            return False
        ends = max(map(sum, zip(asked.starts, asked.counts, strict=True)))
        return missing * _FEW <= len(asked.rows) and max(self._lengths) <= ends

    def _widened(self, asked: Pass) -> Pass:
        """The pass in which the other rows take part with zero tokens."""
        index, counts = torch.tensor(asked.rows, device=self.device), [0] * self.batch
        for row, count in zip(asked.rows, asked.counts, strict=True):
            counts[row] = count
        tokens = asked.tokens.new_zeros(self.batch, asked.tokens.shape[1]).index_copy_(0, index, asked.tokens)
        return asked._replace(
            tokens=tokens, rows=range(self.batch), whole=True, starts=self.lengths, counts=counts
        )

    def _places(self, asked: Pass) -> RowPlaces:
        """Of any pass; rows without a tree read a chain."""
        start, n = asked.starts[0], asked.tokens.shape[1]
        if asked.aligned:
            positions = self._positions[:, start : start + n]
            positions = positions if self.batch == 1 else positions.expand(self.batch, n)
            return RowPlaces(positions, positions, self._numbers, self._positions[0, : start + n])
        rows = self._numbers if asked.whole else torch.tensor(asked.rows, device=self.device)
        if asked.branches:
            assert asked.trees is not None
            each = zip(asked.trees, asked.starts, asked.counts, strict=True)
            trees = [RowTree(start).chained(count) if tree is None else tree for tree, start, count in each]
            positions, slots, keys = tree_places(trees, asked.counts, n, self.max_len, self.device)
            return RowPlaces(positions, slots, rows, keys)
        ends = [start + count for start, count in zip(asked.starts, asked.counts, strict=True)]
        starts, stops = torch.tensor([asked.starts, ends], device=self.device)[:, :, None]
        wanted = starts + torch.arange(n, device=self.device)
        # Padding goes to the spare slot, which is never visible: a mask would not hide a NaN.
        slots = wanted.where(wanted < stops, self.max_len)
        # Padding repeats its row's last position: a query that sees no key at all gives NaN.
        positions = wanted.minimum((stops - 1).clamp(min=0))
        return RowPlaces(positions, slots, rows, self._positions[0, : max(1, *ends)])


def _spread(states: Tensor, real: Tensor) -> Tensor:
    """States ``[tokens, d]`` -> ``[rows, n, d]``; zeros, of memory that is not touched, where ``real`` is false."""
    made = torch.from_numpy(np.zeros((*real.shape, states.shape[-1]), np.float32))
    made[real] = states
    return made


# --- masks ---
def mask_dtype(model: PreTrainedModel) -> torch.dtype:
    """Of the masks that a model's attention takes."""
    return torch.bool if model.config._attn_implementation in BOOLEAN else model.dtype


def masks_of(windows: Windows, make: Callable[[int | None], Tensor | None]) -> Mask:
    """The masks in the form that a model takes: one tensor, or a dict with one per layer type."""
    if "" in windows:
        return make(windows[""])
    return {kind: make(window) for kind, window in windows.items()}


def window_mask(key: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of queries at ``positions [batch, n]`` over keys, as in ``RowPlaces``: ``[batch, 1, n, keys]``.

    A query at position t sees keys at max(0, t - window + 1)..t.
    """
    query = positions[:, None, :, None]
    if key.dim() == 3:
        key = key[:, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


# --- keys and values: buffers of fixed size, written at each row's own positions ---
@dataclass(slots=True)
class Span:
    """Slots of the tokens of the current forward pass; one object, shared by all layers.

    Attributes:
        batch, max_len: of the runner.
        start: first slot, if rows are aligned.
        keys: number of keys that are visible, over all rows.
        index: ``[rows, n]`` slot of each token; None: the rows are aligned.
        rows: ``[rows, 1]`` row numbers that belong to ``index``.
        some: whether they are not simply all rows in order.
        flat: whether the tokens of all rows stand in one line: ``index`` and ``rows`` are ``[1, tokens]``.
        dtype: of keys and values; None: that of the first ones that are written.
    """

    batch: int
    max_len: int
    start: int = 0
    keys: int = 0
    index: Tensor | None = None
    rows: Tensor | None = None
    some: bool = False
    flat: bool = False
    dtype: torch.dtype | None = None


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of one layer: ``[batch, heads, max_len + 1, d]``; the last slot takes padding and is never visible.

    Args:
        span: of the pass. buffers: K and V that are there already.
    """

    def __init__(self, span: Span, buffers: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._span = span
        if buffers is not None:
            (self.keys, self.values), self.is_initialized = buffers, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a masked key still meets a weight of 0, and 0 · NaN is NaN.
        batch, slots = self._span.batch, self._span.max_len + 1
        self.keys, self.values = (
            x.new_zeros(batch, x.shape[1], slots, x.shape[3], dtype=self._span.dtype or x.dtype)
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's keys and values; returns what it sees, of the rows that take part."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, span, wide = self.keys, self.values, self._span, key_states.dtype
        assert keys is not None and values is not None
        if span.dtype is None:  # writing the states of a model that was moved fails, see ``refuse_moved``
            wide = keys.dtype
        elif keys.dtype != wide:
            key_states, value_states = (_rounded(one, keys.dtype) for one in (key_states, value_states))
        if span.index is None or span.rows is None:
            n = key_states.shape[2]
            keys.narrow(2, span.start, n).copy_(key_states)
            values.narrow(2, span.start, n).copy_(value_states)
        else:
            rows, index = (
                span.rows.to(keys.device),
                span.index.to(keys.device),
            )  # layers may be on several devices
            keys[rows, :, index] = key_states.transpose(1, 2)
            values[rows, :, index] = value_states.transpose(1, 2)
        keys, values = keys.narrow(2, 0, span.keys), values.narrow(2, 0, span.keys)
        if not span.some or span.rows is None:
            return keys.to(wide), values.to(wide)
        own = span.rows.flatten().to(keys.device)
        return keys.index_select(0, own).to(wide), values.index_select(0, own).to(wide)

    def get_seq_length(self) -> int:
        return self._span.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span.keys, 0

    def get_max_length(self) -> int:
        return self._span.max_len


def _rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values in another dtype, whose largest number stands for larger ones."""
    most = torch.finfo(dtype).max
    return (states.clamp(-most, most) if most < torch.finfo(states.dtype).max else states).to(dtype)


class RowCache(Cache):
    """transformers' view of the rows: answers a model's queries from the span of the pass.

    The base class would loop over all layers for each query, several times per forward pass.

    Args:
        batch, max_len: of the runner. dtype: of keys and values; None: that of the model.
    """

    is_sliding: ClassVar[list[bool]] = []
    is_linear: ClassVar[list[bool]] = []
    is_dummy: ClassVar[list[bool]] = []
    is_compileable: ClassVar[bool] = False

    def __init__(self, batch: int, max_len: int, dtype: torch.dtype | None = None) -> None:
        self.span = Span(batch, max_len, dtype=dtype)
        super().__init__(layer_class_to_replicate=partial(RowLayer, self.span))  # type: ignore[arg-type]

    def reserve(self, layers: Sequence[int], heads: int, d: int, dtype: torch.dtype) -> list[Tensor]:
        """Keys and values of layers in turn, for kernels that write them; those that have none get them on the CPU."""
        made: list[Tensor] = []
        for number in layers:
            while number >= len(self.layers):
                self.layers.append(RowLayer(self.span))
            own: Any = self.layers[number]
            if not own.is_initialized:
                states = torch.empty(1, heads, 1, d, dtype=dtype, device="cpu")
                own.lazy_initialization(states, states)
            made += (own.keys, own.values)
        return made

    @property
    def nbytes(self) -> int:
        """Size of the buffers that are allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def buffers(self) -> list[Tensor]:
        """Keys and values of each layer in turn that has its buffers."""
        layers: list[Any] = self.layers
        return [buffer for one in layers if one.is_initialized for buffer in (one.keys, one.values)]

    def make_like(self, other: RowCache) -> None:
        """Allocate the buffers of all layers, of the type of another cache's, unless they are there."""
        buffers = other.buffers()
        if len(self.buffers()) < len(buffers):
            self.layers.clear()
            for keys, values in zip(buffers[::2], buffers[1::2], strict=True):
                self.layers.append(RowLayer(self.span))
                self.layers[-1].lazy_initialization(keys, values)  # type: ignore[union-attr]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.span.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.span.keys, 0
