"""CUDA graphs of a runner's units: one for each length of a ladder and each size of the visible keys.

A graph reads and writes fixed memory, so that inputs are copied in and results copied out; the cache's buffers are the
runner's own. Shorter feeds are padded up the ladder: padding sits at position 0 and writes to its row's spare slot. The
visible keys are rounded up to a power of two, so that attention costs at most twice what the context needs.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.errors import SprinterError, UserError
from sprinter.models.captured import Unit, as_module, split_inputs
from sprinter.models.compiled import Compiled
from sprinter.models.marks import Watch, places
from sprinter.models.row import Windows
from sprinter.models.trace import RowPass

__all__ = ["LADDER", "GraphUnits", "keys_bucket", "rung"]

LADDER = (1, 2, 4, 8, 16, 32)
"""Lengths that are captured; longer passes run eagerly."""

_LEAST_KEYS = 128
_log = logging.getLogger("sprinter")


def rung(n: int) -> int | None:
    """The shortest length of the ladder that holds n tokens, None beyond its end."""
    return next((length for length in LADDER if length >= n), None)


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
    _graphs: dict[tuple[str, tuple[Hashable, int], int, int], _Graph] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    _watch: Watch = field(default_factory=lambda: Watch(contents=False))
    _places: WeakKeyDictionary[Unit, Hashable] = field(default_factory=WeakKeyDictionary)

    def begin(self) -> None:
        """See ``Units``. A graph reads weights where they lay when it was captured: values may change, places not."""
        self._places.clear()
        if self._watch.changed(self.model):
            self._graphs.clear()
            self._refused.clear()

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled | None:
        """See ``Units``.

        Raises:
            UserError: the model cannot be captured, and must be.
        """
        batch, n = like[0].shape
        length = rung(n)
        if length is None or unit.key in self._refused:
            return None
        keys = keys_bucket(like[4].shape[0], like[-1].shape[2])
        if unit not in self._places:
            self._places[unit] = places(unit)
        key = (unit.key, (self._places[unit], -batch if some else batch), length, keys)
        if key not in self._graphs:
            try:
                self._graphs[key] = _Graph(RowPass(self.model, self.windows, some), unit, length, keys, like)
            except torch.OutOfMemoryError:
                raise  # no fault of the unit: run eagerly it would fail a little later
            except (
                RuntimeError,
                SprinterError,
            ) as error:  # what CUDA says of a capture, what we say of a model
                self._refuse(unit, error)
                return None
        return self._graphs[key]

    def _refuse(self, unit: Unit, error: Exception) -> None:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        line = f"{type(self.model).__name__} cannot be captured as a CUDA graph ({why})"
        if self.must:
            raise UserError(f"{line}: use compile=False") from error
        _log.warning("%s: it runs eagerly", line)
        self._refused.add(unit.key)


class _Graph:
    """One captured unit. Called with inputs of the present shape, gives results of that shape.

    Args:
        rows, unit: what is captured. length, keys: the shape that it is captured for.
        like: inputs of the present call; its buffers are the ones that the graph will always use.
    """

    def __init__(self, rows: RowPass, unit: Unit, length: int, keys: int, like: Sequence[Tensor]) -> None:
        batch, device = like[0].shape[0], like[0].device
        whole = {"dtype": torch.long, "device": device}
        self._places = [torch.zeros(batch, length, **whole) for _ in range(3)]  # type: ignore[call-overload]
        self._spare = like[-1].shape[2] - 1
        extras, buffers = split_inputs(like)
        # Rows and extras have one entry a row, whatever the length.
        self._rows = [x.clone() for x in (like[3], *extras)]
        self._per_token = unit.per_token
        run, seen = as_module(rows, unit), torch.arange(keys, device=device)
        self._fill(like)
        # Twice outside the graph, on a stream of its own: libraries set themselves up at the first calls. The keys and
        # values that this writes are those of the present call.
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run(*self._places, self._rows[0], seen, self._rows[1:], buffers)
        torch.cuda.current_stream(device).wait_stream(stream)
        # Nobody else may be given the memory that the graph reads.
        self._read = [x for part in (rows, unit) for x in (*part.parameters(), *part.buffers())]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._made = run(*self._places, self._rows[0], seen, self._rows[1:], buffers)

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Copy in, replay, copy out: results stay when the graph runs again."""
        n = inputs[0].shape[1]
        self._fill(inputs)
        self._graph.replay()
        return [(made[:, :n] if self._per_token else made).clone() for made in self._made]

    def _fill(self, inputs: Sequence[Tensor]) -> None:
        n = inputs[0].shape[1]
        padding = (0, 0, self._spare)
        for place, given, value in zip(self._places, inputs, padding, strict=False):
            if n < place.shape[1]:
                place[:, n:] = value
            place[:, :n].copy_(given)
        for own, given in zip(self._rows, (inputs[3], *inputs[5:]), strict=False):
            own.copy_(given)
