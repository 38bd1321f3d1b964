"""CUDA graphs of a runner's units: one for each number of rows, length of a ladder and size of the visible keys.

A graph reads and writes fixed memory, so that inputs are copied in and results copied out; the cache's buffers are the
runner's own. Shorter feeds are padded up the ladder, fewer rows than the cache's up to a power of two: padding sits at
position 0 and writes to a spare slot. The visible keys are rounded up to a power of two too, so that attention costs at
most twice what the context needs. The graphs of a runner, of which the last used are kept, share memory for what lies
between inputs and results: one runs at a time. Trees have graphs of their own, whose visible keys are an input.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.errors import SprinterError, UserError
from sprinter.models.capture.compiled import Compiled
from sprinter.models.capture.marks import Watch, places
from sprinter.models.capture.runner import Unit, as_module, split_inputs
from sprinter.models.capture.trace import RowPass
from sprinter.models.runners.row import Windows
from sprinter.models.runners.tree import NOWHERE

__all__ = ["LADDER", "MOST", "GraphUnits", "keys_bucket", "rows_bucket", "rung"]

LADDER = (1, 2, 4, 8, 16, 32)
"""Lengths that are captured; longer passes run eagerly."""

MOST = 64
"""Graphs that a runner keeps."""

_LEAST_KEYS = 128
_capturing = Lock()
"""One capture at a time; other threads' passes go on meanwhile."""
_log = logging.getLogger("sprinter")


def rung(n: int) -> int | None:
    """The shortest length of the ladder that holds n tokens, None beyond its end."""
    return next((length for length in LADDER if length >= n), None)


def rows_bucket(rows: int, held: int) -> int:
    """The number that so many of ``held`` rows are rounded up to."""
    return min(1 << (rows - 1).bit_length(), held)


def keys_bucket(seen: int, slots: int) -> int:
    """The size that ``seen`` keys are rounded up to, where a row has ``slots`` slots, the last of them spare."""
    return min(max(_LEAST_KEYS, 1 << (seen - 1).bit_length()), slots - 1)


@dataclass(slots=True)
class GraphUnits:
    """Units of one runner, captured as CUDA graphs when they are first met; see ``Units``.

    Args:
        model: a model that the row runner serves, on one CUDA device. windows: its masks.
        must: raise where a unit cannot be captured, instead of saying so once and going the eager way.
    """

    model: PreTrainedModel
    windows: Windows
    must: bool = False
    _graphs: OrderedDict[tuple[str, tuple[Hashable, int], int, int], _Graph] = field(
        default_factory=OrderedDict
    )
    _refused: set[str] = field(default_factory=set)
    _watch: Watch = field(default_factory=lambda: Watch(contents=False))
    _places: WeakKeyDictionary[Unit, Hashable] = field(default_factory=WeakKeyDictionary)
    _pool: Any = None
    _full: bool = False

    def begin(self) -> None:
        """See ``Units``. A graph reads weights where they lay when it was captured: values may change, places not."""
        self._places.clear()
        if self._watch.changed(self.model):
            self._graphs.clear()
            self._refused.clear()
            self._full = False

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled | None:
        """See ``Units``. Without memory for another graph, which is said once, the eager way is taken from then on.

        Raises:
            UserError: the model cannot be captured, and must be.
        """
        rows, n = like[0].shape
        held, slots = like[-1].shape[0], like[-1].shape[2]
        length, kind = rung(n), unit.key if like[4].dim() == 1 else f"{unit.key} tree"
        if length is None or kind in self._refused:
            return None
        if some:
            rows = rows_bucket(rows, held)
        keys = keys_bucket(like[4].shape[-1], slots)
        if unit not in self._places:
            self._places[unit] = places(unit)
        key = (kind, (self._places[unit], -rows if some else rows), length, keys)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key]
        if self._full:
            return None
        while len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)
        try:
            made = self._capture(RowPass(self.model, self.windows, some), unit, rows, length, keys, like)
        except (RuntimeError, SprinterError) as error:  # what CUDA says of a capture, what we say of a model
            if _is_out_of_memory(error):
                self._full = True
                _log.warning("there is no memory for another CUDA graph: passes not yet captured run eagerly")
            else:
                self._refuse(kind, error)
            return None
        self._graphs[key] = made
        return made

    def _capture(
        self, run: RowPass, unit: Unit, rows: int, length: int, keys: int, like: Sequence[Tensor]
    ) -> _Graph:
        with _capturing, torch.cuda.device(like[0].device):
            if (
                not self._graphs
            ):  # torch forgets a pool with the last of its graphs, and takes it for none anew
                self._pool = torch.cuda.graph_pool_handle()
            return _Graph(run, unit, rows, length, keys, like, self._pool)

    def _refuse(self, kind: str, error: Exception) -> None:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        line = f"{type(self.model).__name__} cannot be captured as a CUDA graph ({why})"
        if self.must:
            raise UserError(f"{line}: use compile=False") from error
        _log.warning("%s: it runs eagerly", line)
        self._refused.add(kind)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that is what an error comes of: the end of a capture that was broken off raises another."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


class _Graph:
    """One captured unit. Called with inputs of the present shape, gives results of that shape.

    Args:
        run, unit: what is captured. rows, length, keys: the shape that it is captured for.
        like: inputs of the present call; its buffers are the ones that the graph will always use.
        pool: memory that it shares with other graphs; none of them may run at the same time.
    """

    def __init__(
        self,
        run: RowPass,
        unit: Unit,
        rows: int,
        length: int,
        keys: int,
        like: Sequence[Tensor],
        pool: Any,
    ) -> None:
        self._device = device = like[0].device
        whole = {"dtype": torch.long, "device": device}
        self._places = [torch.zeros(rows, length, **whole) for _ in range(3)]  # type: ignore[call-overload]
        self._spare = like[-1].shape[2] - 1
        extras, buffers = split_inputs(like)
        # Rows and extras have one entry a row, whatever the length.
        self._rows = [x.new_zeros(rows, *x.shape[1:]) for x in (like[3], *extras)]
        self._per_token = unit.per_token
        # A graph holds none of the memory that it reads: all of it is held here.
        self._seen, self._buffers = torch.arange(keys, device=device), buffers
        if like[4].dim() == 3:
            self._seen = self._seen.repeat(rows, length, 1)
        module = as_module(run, unit)
        self._weights = [x for part in (run, unit) for x in (*part.parameters(), *part.buffers())]
        inputs = (*self._places, self._rows[0], self._seen, self._rows[1:], self._buffers)
        self._fill(like)
        # Twice outside the graph, on a stream of its own: libraries set themselves up at the first calls. The keys and
        # values that this writes are those of the present call.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                module(*inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._made = module(*inputs)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy in, replay, copy out: results stay when the graph runs again."""
        rows, n = inputs[0].shape
        with torch.cuda.device(self._device):
            self._fill(inputs)
            self._graph.replay()
            return [(made[:rows, :n] if self._per_token else made[:rows]).clone() for made in self._made]

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        rows, n = inputs[0].shape
        padding = (0, 0, self._spare)
        for place, given, value in zip(self._places, inputs, padding, strict=False):
            if (rows, n) != place.shape:
                place.fill_(value)
            place[:rows, :n].copy_(given)
        if self._seen.dim() == 3:
            self._seen.fill_(NOWHERE)
            self._seen[..., 0] = 0  # what padding sees
            self._seen[:rows, :n, : inputs[4].shape[2]].copy_(inputs[4])
        for own, given in zip(self._rows, (inputs[3], *inputs[5:]), strict=False):
            own[:rows].copy_(given)
            own[rows:].copy_(given[:1])  # padding is the first row's, in a slot where nobody looks
