"""Keys and values of the row runner: buffers of fixed size, written at each row's own positions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["RowCache", "RowLayer", "Span"]


class Span:
    """Slots of the tokens of the current forward pass; one object, shared by all layers.

    Attributes:
        start: first position, if rows are aligned.
        keys: number of keys that are visible, over all rows.
        index: ``[rows, n]`` slot of each token if rows are ragged, else None.
        rows: ``[rows, 1]`` row numbers that belong to ``index``.
        some: whether only some rows take part.
        flat: whether the tokens of all rows stand in one line: ``index`` and ``rows`` are ``[1, tokens]``.
    """

    __slots__ = ("flat", "index", "keys", "rows", "some", "start")

    def __init__(self, rows: Tensor) -> None:
        self.start, self.keys, self.rows, self.some, self.flat = 0, 0, rows, False, False
        self.index: Tensor | None = None


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """K and V of one layer: ``[batch, heads, max_len + 1, d]``; the last slot takes padding and is never visible."""

    def __init__(self, span: Span, max_len: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._span, self._max_len = span, max_len

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # Zeros, not empty memory: a masked key still meets a weight of 0, and 0 · NaN is NaN.
        self.keys = _buffer_like(key_states, self._max_len + 1)
        self.values = _buffer_like(value_states, self._max_len + 1)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values, own = self.write(key_states, value_states)
        if own is not None:
            return keys.index_select(0, own), values.index_select(0, own)
        return keys, values

    def write(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write the pass's keys and values; returns those of all rows that are visible, views ``[batch, heads, keys,
        d]``, and the numbers of the rows that take part, int64 ``[rows]``, or None for all; if ``Span.flat``, the row
        of each token."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, span = self.keys, self.values, self._span
        assert keys is not None
        assert values is not None
        if span.index is None:
            n = key_states.shape[2]
            keys.narrow(2, span.start, n).copy_(key_states)
            values.narrow(2, span.start, n).copy_(value_states)
        else:
            # Layers may be on several devices.
            rows, index = span.rows.to(keys.device), span.index.to(keys.device)
            keys[rows, :, index] = key_states.transpose(1, 2)
            values[rows, :, index] = value_states.transpose(1, 2)
        return self.visible()

    def visible(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """What ``write`` returns."""
        assert self.keys is not None
        assert self.values is not None
        span, own = self._span, None
        if span.index is not None and (span.flat or span.some):
            rows = span.rows.to(self.keys.device)
            own = rows[0] if span.flat else rows[:, 0]
        return self.keys.narrow(2, 0, span.keys), self.values.narrow(2, 0, span.keys), own

    def copy_rows(self, from_row: int, to_rows: Sequence[int], length: int) -> None:
        if not self.is_initialized:
            return
        for buffer in (self.keys, self.values):
            assert buffer is not None
            held = buffer[from_row, :, :length].clone()
            for row in to_rows:
                buffer[row, :, :length] = held

    def compact(self, row: int, path: Sequence[int], start: int) -> None:
        for buffer in (self.keys, self.values):
            assert buffer is not None
            buffer[row, :, start : start + len(path)] = buffer[row][:, list(path)]

    def wipe(self, row: int, length: int) -> None:
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                assert buffer is not None
                buffer[row, :, length:].zero_()

    def get_seq_length(self) -> int:
        return self._span.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._span.keys, 0

    def get_max_length(self) -> int:
        return self._max_len


def _buffer_like(states: Tensor, slots: int) -> Tensor:
    batch, heads, _, d = states.shape
    return torch.zeros(batch, heads, slots, d, dtype=states.dtype, device=states.device)


class RowCache(Cache):
    """transformers' view of the rows: answers a model's queries from the span.

    The base class would loop over all layers for each query, several times per forward pass.
    """

    is_sliding: ClassVar[list[bool]] = []
    is_linear: ClassVar[list[bool]] = []
    is_dummy: ClassVar[list[bool]] = []
    is_compileable: ClassVar[bool] = False

    def __init__(self, max_len: int, rows: Tensor) -> None:
        self.span, self._max_len, self._batch = Span(rows), max_len, len(rows)
        super().__init__(layer_class_to_replicate=partial(RowLayer, self.span, max_len))  # type: ignore[arg-type]

    def holds(self, layers: Sequence[int]) -> bool:
        """Whether these layers have their buffers."""
        own: Any = self.layers
        return max(layers) < len(own) and all(own[layer].is_initialized for layer in layers)

    def reserve(self, layers: Sequence[int], heads: int, d: int) -> None:
        """Allocate the buffers of layers on the CPU, in float32, that have none."""
        for number in layers:
            while number >= len(self.layers):
                self.layers.append(RowLayer(self.span, self._max_len))
            own = self.layers[number]
            assert isinstance(own, RowLayer)
            if not own.is_initialized:
                states = torch.empty(1, dtype=torch.float32, device="cpu").expand(self._batch, heads, 1, d)
                own.lazy_initialization(states, states)

    def visible(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """``RowLayer.visible`` of a layer, for kernels that write the keys and values of a pass themselves."""
        own = self.layers[layer]
        assert isinstance(own, RowLayer)
        return own.visible()

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Row and slot of each token of a pass ``[rows, n]`` over ragged rows, int64 ``[rows * n]``."""
        return self.span.rows.expand_as(index).reshape(-1).contiguous(), index.reshape(-1).contiguous()

    def addresses(self, layers: Sequence[int]) -> list[int]:
        """Where the keys and values of these layers are, in turn."""
        held: list[Any] = [self.layers[layer] for layer in layers]
        return [buffer.data_ptr() for layer in held for buffer in (layer.keys, layer.values)]

    @property
    def nbytes(self) -> int:
        """Size of the buffers that are allocated."""
        layers: list[Any] = self.layers
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers if layer.is_initialized)

    def buffers(self) -> list[Tensor]:
        """Keys and values of each layer in turn; empty where none has its buffers yet."""
        made: list[Tensor] = []
        for layer in self.layers:
            assert isinstance(layer, RowLayer)
            assert layer.keys is not None
            assert layer.values is not None
            made += [layer.keys, layer.values]
        return made

    def make_like(self, other: RowCache, batch: int, max_len: int) -> None:
        """Allocate the buffers of all layers anew, of the type of another cache's."""
        self.layers.clear()
        buffers = [x[:1].expand(batch, -1, -1, -1) for x in other.buffers()]
        for keys, values in zip(buffers[::2], buffers[1::2], strict=True):
            layer = RowLayer(self.span, max_len)
            layer.lazy_initialization(keys, values)
            self.layers.append(layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.span.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.span.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.span.keys, 0
