"""CUDA graphs of a runner's units: one per number of rows, input length and number of visible keys, all rounded up.

A graph reads and writes fixed memory: inputs are copied in and results copied out, while the cache's buffers are the
runner's own. Inputs are padded to the next length of a ladder, and rows, if not all take part, to the next power of
two; padding has position 0 and writes to a spare slot. The visible keys are also rounded up to a power of two, so that
attention costs at most twice what the context needs. A runner keeps the graphs that were used last. They share memory
for what they read and write, so that only one runs at a time; where it grows, graphs over less are dropped. Trees have
their own graphs, whose visible keys are an input. A graph reads weights where they were when it was captured: their
values may change, their place not.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.errors import SprinterError, UserError, first_line
from sprinter.models.capture.trace import RowPass, Unit, as_function
from sprinter.models.runners.row import Windows
from sprinter.models.runners.tree import NOWHERE

__all__ = [
    "LADDER", "MOST", "Captured", "Fuse", "GraphUnits", "Inputs", "keys_bucket", "length_bucket", "rows_bucket",
]  # fmt: skip

LADDER = (1, 2, 4, 8, 16, 32)
"""Input lengths that are captured; longer forward passes run eagerly."""

MOST = 64
"""Maximum number of graphs that a runner keeps."""

Fuse = Callable[[RowPass, Sequence[Tensor]], AbstractContextManager[bool]]
"""Context in which a pass over some buffers runs, and is captured, with kernels of its own: whether it does."""


class Inputs(NamedTuple):
    """What a captured unit is given: tokens ``[rows, n]``, the fields of ``RowPlaces``, what the unit reads besides,
    ``[rows, ...]`` each, and K and V of each layer in turn, which are written in place."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    keys: Tensor
    extras: Sequence[Tensor]
    buffers: list[Tensor]


Captured = Callable[[Inputs], list[Tensor]]

_SharedPart = tuple[str, int, torch.dtype]
_LEAST_KEYS = 128
_capturing = Lock()
"""Held during a capture, so that there is one at a time; forward passes of other threads are not blocked."""
_log = logging.getLogger("sprinter")


def length_bucket(n: int) -> int | None:
    """The shortest length of the ladder that holds n tokens; None if n is too long."""
    return next((length for length in LADDER if length >= n), None)


def rows_bucket(rows: int, held: int) -> int:
    """The number of rows that ``rows`` is rounded up to, out of ``held`` rows."""
    return min(1 << (rows - 1).bit_length(), held)


def keys_bucket(seen: int, slots: int) -> int:
    """The number that ``seen`` keys are rounded up to; a row has ``slots`` slots, the last of which is spare."""
    return min(max(_LEAST_KEYS, 1 << (seen - 1).bit_length()), slots - 1)


@dataclass(slots=True)
class GraphUnits:
    """Units of one runner, captured as CUDA graphs at first use.

    Args:
        model: a model that the row runner serves, on one CUDA device.
        windows: its masks.
        must: raise if a unit cannot be captured, instead of logging a warning once and running eagerly.
        fuse: see ``Fuse``.
    """

    model: PreTrainedModel
    windows: Windows
    must: bool = False
    fuse: Fuse | None = None
    _graphs: OrderedDict[tuple[str, tuple[Unit, int], int, int], _Graph] = field(default_factory=OrderedDict)
    _refused: set[tuple[str, Unit]] = field(default_factory=set)
    _pool: Any = None
    _shared: dict[_SharedPart, Tensor] = field(default_factory=dict)
    _unfused: bool = False
    _full: bool = False

    def find(self, unit: Unit, some: bool, like: Inputs) -> Captured | None:
        """The captured unit for inputs of this shape; None: run eagerly. If memory for another graph runs out, a
        warning is logged and new shapes run eagerly.

        Args:
            some: whether only some rows of the buffers take part.
            like: the inputs of the current call.

        Raises:
            UserError: the model cannot be captured, and ``must`` is set.
        """
        rows, n = like.tokens.shape
        held, slots = like.buffers[0].shape[0], like.buffers[0].shape[2]
        length, kind = length_bucket(n), unit.name if like.keys.dim() == 1 else f"{unit.name} tree"
        if length is None or (kind, unit) in self._refused:
            return None
        if some:
            rows = rows_bucket(rows, held)
        keys = keys_bucket(like.keys.shape[-1], slots)
        key = (kind, (unit, -rows if some else rows), length, keys)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if self._full:
            return None
        while len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)
        try:
            made = self._capture(RowPass(self.model, self.windows, some), unit, rows, length, keys, like)
        except (RuntimeError, SprinterError) as error:  # from CUDA during a capture, or from our own checks
            if _is_out_of_memory(error):
                self._full = True
                _log.warning(
                    "there is no memory for another CUDA graph: forward passes not yet captured run eagerly"
                )
            else:
                self._refuse((kind, unit), error)
            return None
        kept = set(map(_address, self._shared.values()))
        for other in [other for other, graph in self._graphs.items() if not kept >= graph.shares]:
            del self._graphs[other]
        self._graphs[key] = made
        return made

    def _capture(self, run: RowPass, unit: Unit, rows: int, length: int, keys: int, like: Inputs) -> _Graph:
        with _capturing, torch.cuda.device(like.tokens.device):
            if (
                not self._graphs
            ):  # torch frees a pool with the last of its graphs, and does not accept it again
                self._pool = torch.cuda.graph_pool_handle()
            if self.fuse is not None and not self._unfused:
                applies = False
                try:
                    with self.fuse(run, like.buffers) as applies:
                        return _Graph(run, unit, rows, length, keys, like, self._pool, self._shared)
                except Exception as error:  # of a kernel's compiler, for example
                    if not applies or _is_out_of_memory(error):
                        raise
                    self._unfused = True
                    _log.warning(
                        "%s is captured without fused layers, which is slower: %s",
                        type(self.model).__name__,
                        first_line(error),
                    )
            return _Graph(run, unit, rows, length, keys, like, self._pool, self._shared)

    def _refuse(self, kind: tuple[str, Unit], error: Exception) -> None:
        why = first_line(error)
        line = f"{type(self.model).__name__} cannot be captured as a CUDA graph ({why})"
        if self.must:
            raise UserError(f"{line}: use compile=False") from error
        _log.warning("%s: it runs eagerly", line)
        self._refused.add(kind)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error was caused by a lack of memory, which may be hidden behind the error of an aborted capture."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Graph:
    """One captured unit. Call it with inputs of any shape that fits; the results have the shape of the inputs.

    Args:
        run, unit: what is captured.
        rows, length, keys: the shape that it is captured for.
        like: inputs of the current call; the graph will always use these buffers.
        pool: memory that it shares with other graphs, which must not run at the same time.
        shared: memory for what it reads besides, and for results, which it shares with them too: else laws add up.

    Attributes:
        shares: the addresses of the parts of ``shared`` that it uses.
    """

    def __init__(
        self, run: RowPass, unit: Unit, rows: int, length: int, keys: int, like: Inputs, pool: Any,
        shared: dict[_SharedPart, Tensor],
    ) -> None:  # fmt: skip
        self._device = device = like.tokens.device
        self._places = [like.tokens.new_zeros(rows, length) for _ in range(3)]
        self._spare = like.buffers[0].shape[2] - 1
        # Rows and extras have one entry per row, independent of the length.
        self.shares, held = set[int](), like.buffers[0].shape[0]

        def part(what: str, place: int, like: Tensor, shape: Sequence[int]) -> Tensor:
            """The beginning of a part, for as many rows as there are; it grows if it is too small."""
            key, size = (what, place, like.dtype), prod(shape)
            if key not in shared or shared[key].numel() < size:
                shared[key] = like.new_zeros(max(held, shape[0]) * prod(shape[1:]))
            self.shares.add(_address(shared[key]))
            return shared[key][:size].view(*shape)

        given = (like.rows, *like.extras)
        self._rows = [part("given", i, x, (rows, *x.shape[1:])) for i, x in enumerate(given)]
        self._per_token = unit.per_token
        # A graph does not keep the memory that it reads alive, so references to all of it are held here.
        self._seen, self._buffers = torch.arange(keys, device=device), like.buffers
        if like.keys.dim() == 3:
            self._seen = self._seen.repeat(rows, length, 1)
        call = as_function(run, unit)
        parts = (run.model, unit)
        self._weights = [x.detach() for part in parts for x in (*part.parameters(), *part.buffers())]
        inputs = (*self._places, self._rows[0], self._seen, self._rows[1:], self._buffers)
        self._fill(like)
        # Run twice outside the graph, on a separate stream, because libraries initialise at their first calls. The keys
        # and values that this writes are those of the current call.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call(*inputs)
            made = call(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._made = [part("made", i, x, x.shape) for i, x in enumerate(made)]
        del made
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            call(*inputs, self._made)

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """Copy inputs in, replay, copy results out, so that they survive the next replay."""
        rows, n = inputs.tokens.shape
        with torch.cuda.device(self._device):
            self._fill(inputs)
            self._graph.replay()
            return [(made[:rows, :n] if self._per_token else made[:rows]).clone() for made in self._made]

    def _fill(self, inputs: Inputs) -> None:
        rows, n = inputs.tokens.shape
        for place, given, padding in zip(self._places, inputs[:3], (0, 0, self._spare), strict=True):
            if (rows, n) != place.shape:
                place.fill_(padding)
            place[:rows, :n].copy_(given)
        if self._seen.dim() == 3:
            self._seen.fill_(NOWHERE)
            self._seen[..., 0] = 0  # padding sees the first key
            self._seen[:rows, :n, : inputs.keys.shape[2]].copy_(inputs.keys)
        for own, given in zip(self._rows, (inputs.rows, *inputs.extras), strict=True):
            own[:rows].copy_(given)
            own[rows:].zero_()  # rows of padding write to a spare slot that is never visible


def _address(part: Tensor) -> int:
    return part.untyped_storage().data_ptr()
