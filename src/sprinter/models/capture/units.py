"""Units compiled for the CPU, and the code of a model that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedModel

from sprinter.models.capture.compiled import Compiled, Recipe, find_compiled
from sprinter.models.capture.marks import Watch, digest
from sprinter.models.capture.runner import FEWEST, LONGEST, ReadUnit, Unit, as_module, parted, split_inputs
from sprinter.models.capture.trace import RowPass, own_attention
from sprinter.models.runners.row import Windows

__all__ = ["CodeCache", "CompiledUnits", "code_of", "forget_code"]

_SIDE_BY_SIDE = 4
"""Number of versions of a unit's code that are kept: several pairs may share a draft, each with its own gate."""


class CodeCache:
    """Compiled code of one model that was loaded, or found missing; shared by all its runners."""

    def __init__(self) -> None:
        self._lock, self._watch = Lock(), Watch()
        self._codes: dict[tuple[str, str, str], Compiled | None] = {}
        self._units: WeakKeyDictionary[Unit, str] = WeakKeyDictionary()
        self._told: set[tuple[str, str, str]] = set()

    def begin(self, model: PreTrainedModel | None = None) -> None:
        """See ``Units``; without a model if the code holds none of its weights. Units are checked for changes too, when
        they are next used."""
        with self._lock:
            self._units.clear()
            if model is not None and self._watch.changed(model):
                self._codes, self._told = {}, set()

    def lacks(self, unit: Unit, shape: str) -> bool:
        """Whether the code was neither asked for in ``find`` nor in this method."""
        key = self._key(unit, shape)
        lacking = key not in self._codes and key not in self._told
        self._told.add(key)
        return lacking

    def _key(self, unit: Unit, shape: str) -> tuple[str, str, str]:
        own = self._units.get(unit)
        if own is None:
            own = self._units[unit] = digest(unit)
        return unit.key, shape, own

    def find(
        self, unit: Unit, shape: str, again: bool, load: Callable[[], Compiled | None]
    ) -> Compiled | None:
        """The code in this cache, else the result of ``load``; ``again``: call it also if it found nothing before."""
        codes, key = self._codes, self._key(unit, shape)
        if key not in codes or (again and codes[key] is None):
            codes[key] = load()
            others = [other for other in codes if other[:2] == key[:2]]
            for other in others[:-_SIDE_BY_SIDE]:
                del codes[other]
        return codes[key]


_shelves: WeakKeyDictionary[PreTrainedModel, CodeCache] = WeakKeyDictionary()


def code_of(model: PreTrainedModel) -> CodeCache:
    """The cache of a model's code."""
    return _shelves.setdefault(model, CodeCache())


def forget_code(model: PreTrainedModel) -> None:
    """Have later runners of a model begin with an empty cache."""
    _shelves.pop(model, None)


@dataclass(slots=True)
class CompiledUnits:
    """Units compiled for the CPU.

    The code contains the weights of model and unit at the time of compilation. Both are checked for changes when a text
    begins (a row reads its first token), so that a text is generated with the weights at its beginning.

    Args:
        model: a model that the row runner serves.
        windows: its masks.
        may_compile: compile code that is not on disk; False: use only code that is.
    """

    model: PreTrainedModel
    windows: Windows
    may_compile: bool
    _shelf: CodeCache = field(init=False)

    def __post_init__(self) -> None:
        self._shelf = code_of(self.model)

    def begin(self) -> None:
        """See ``Units``."""
        self._shelf.begin(self.model)

    def missing(self, unit: Unit, like: Callable[[], Sequence[Tensor]]) -> list[Recipe]:
        """See ``Units``."""
        if not self.may_compile:
            return []
        every = ["any"] if isinstance(unit, ReadUnit) else ["any", "one"]
        shapes = [shape for shape in every if self._shelf.lacks(unit, shape)]
        if not shapes:
            return []
        extras, buffers = parted(like())
        if buffers[-1].shape[2] < FEWEST:
            return []
        return [self._recipe(unit, shape, extras, buffers) for shape in shapes]

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled | None:
        """See ``Units``. Shapes: "one" token of one row, "any" number of tokens of all rows, "some" rows; "tree" and
        "some-tree" if the visible keys differ between queries."""
        if like[-1].shape[2] < FEWEST:
            return None
        if like[4].dim() == 3:
            shape = "some-tree" if some else "tree"
        else:
            shape = "some" if some else "one" if like[0].numel() == 1 else "any"
        return self._shelf.find(
            unit,
            shape,
            self.may_compile,
            lambda: find_compiled(self._recipe(unit, shape, *split_inputs(like)), self.may_compile),
        )

    def _recipe(self, unit: Unit, shape: str, extras: Sequence[Tensor], buffers: Sequence[Tensor]) -> Recipe:
        facts = {
            "unit": unit.key,
            "shape": shape,
            "windows": self.windows,
            "attention": self.model.config._attn_implementation,
        }
        return Recipe(
            f"{unit.name}-{shape}",
            self.model,
            unit,
            facts,
            lambda: self._export(unit, shape, extras, buffers),
        )

    def _export(
        self, unit: Unit, shape: str, extras: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> torch.export.ExportedProgram:
        """Export the unit with dtypes and sizes of these inputs; batch and lengths stay dynamic."""
        single, some, tree = shape == "one", shape.startswith("some"), shape.endswith("tree")
        held = 3 if some else 2
        batch, n, seen, slots = (1, 1, 24, 40) if single else (2, 6, 24, 40)
        places, keys = torch.arange(seen - n, seen).expand(batch, n).contiguous(), torch.arange(seen)
        if tree:
            keys = keys.expand(batch, n, seen).contiguous()
        inputs = (
            torch.zeros(batch, n, dtype=torch.long),
            places,
            places.clone(),
            torch.arange(batch),
            keys,
            [x[:1].expand(batch, *x.shape[1:]).clone() for x in extras],
            [x.new_zeros(1 if single else held, x.shape[1], slots, x.shape[3]) for x in buffers],
        )
        rows = {} if single else {0: Dim("batch", min=1, max=4096)}
        whole = {0: Dim("held", min=1, max=4096)} if some else rows
        text = {} if single else {**rows, 1: Dim("n", min=1, max=LONGEST)}
        visible = {**text, 2: Dim("seen", min=1)} if tree else {0: Dim("seen", min=1)}
        dynamic = (
            text, text, text, rows, visible,
            [rows] * len(extras), [{**whole, 2: Dim("slots", min=FEWEST)}] * len(buffers),
        )  # fmt: skip
        module = as_module(RowPass(self.model, self.windows, some), unit)
        with own_attention(self.model):
            return torch.export.export(module, inputs, dynamic_shapes=dynamic, strict=False)
