"""Units over models whose decoder layers our kernels run: the forward pass is theirs, what follows it is compiled.

Such code holds no weights of a model and knows no layer: it is a function of logits and states, the same for all models
with a vocabulary and a width, for any number of rows and tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from sprinter.models.capture.compiled import Compiled, Recipe, find_compiled
from sprinter.models.capture.runner import LONGEST, PASS, ReadUnit, Unit, UnitRunner
from sprinter.models.capture.units import CodeCache, code_of
from sprinter.models.runners.forward import StateFilter, head_sizes
from sprinter.models.runners.row import Windows

__all__ = ["MOST_TOKENS", "JoinedRunner", "ResultUnits"]

MOST_TOKENS = 1 << 14
"""Largest vocabulary whose results are compiled. A unit computes all signals, and one-hot laws beside others: over
larger ones that takes longer than the few operations that a step needs, one at a time."""


@dataclass(slots=True)
class ResultUnits:
    """Compiled code of units over one model's results.

    Args:
        model: a model whose logits and states are in float32.
        may_compile: compile code that is not on disk; False: use only code that is.
    """

    model: PreTrainedModel
    may_compile: bool
    _codes: CodeCache = field(init=False)

    def __post_init__(self) -> None:
        self._codes = code_of(self.model)

    def begin(self) -> None:
        """Called when a text begins: units are checked for changes when they are next used."""
        self._codes.begin()

    def missing(self, unit: Unit, extras: Sequence[Tensor]) -> list[Recipe]:
        """See ``UnitRunner.missing``."""
        if not self.may_compile or unit is PASS or isinstance(unit, ReadUnit):
            return []
        return [self._recipe(unit, extras)] if self._codes.lacks(unit, self._shape(extras)) else []

    def find(self, unit: Unit, extras: Sequence[Tensor]) -> Compiled | None:
        """The unit as a function of logits, states and extras; None: it is not compiled, and must not be."""
        return self._codes.find(
            unit,
            self._shape(extras),
            self.may_compile,
            lambda: find_compiled(self._recipe(unit, extras), self.may_compile),
        )

    def _shape(self, extras: Sequence[Tensor]) -> str:
        """What code depends on besides the unit; the model's sizes may change between texts."""
        return f"{head_sizes(self.model)} {[(x.shape[1], x.dtype) for x in extras]}"

    def _recipe(self, unit: Unit, extras: Sequence[Tensor]) -> Recipe:
        sizes = head_sizes(self.model)
        facts = {"unit": unit.key, "shape": self._shape(extras)}
        return Recipe(f"{unit.name}-results", None, unit, facts, lambda: _export(unit, sizes, extras))


def _export(unit: Unit, sizes: Sequence[int], extras: Sequence[Tensor]) -> torch.export.ExportedProgram:
    batch, n = 2, 6
    given = [torch.zeros(batch, n, size, dtype=torch.float32, device="cpu") for size in sizes]
    more = [x[:1].expand(batch, -1).clone() for x in extras]
    rows = {0: Dim("batch", min=1, max=4096)}
    text = {**rows, 1: Dim("n", min=1, max=LONGEST)}
    shapes = (text, text, [rows] * len(more))
    return torch.export.export(_AfterPass(unit), (*given, more), dynamic_shapes=shapes, strict=False)


class _AfterPass(nn.Module):
    """A unit as a function of what the forward pass returned: logits ``[batch, n, vocab]``, states ``[batch, n, d]``
    and extras in, a tuple of tensors out."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.unit = unit

    def forward(self, logits: Tensor, states: Tensor, extras: list[Tensor]) -> tuple[Tensor, ...]:
        def run(keep: StateFilter | None) -> tuple[Tensor, ...]:
            return (logits if keep is None else keep(logits)), states

        return self.unit(run, extras)  # type: ignore[no-any-return]


class JoinedRunner(UnitRunner):
    """A unit runner of a model with joined layers (``models.quantised.whole``).

    Args:
        model, batch, max_len, windows: see ``RowRunner``.
        units: the code of its units.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, max_len: int, windows: Windows, units: ResultUnits
    ) -> None:
        super().__init__(model, batch, max_len, windows, flat=True)
        self._units: ResultUnits = units

    def missing(self, unit: Unit, extras: Sequence[Tensor]) -> list[Recipe]:
        """See ``UnitRunner``."""
        return self._units.missing(unit, extras)

    def _run(
        self,
        unit: Unit,
        tokens: Tensor,
        counts: Sequence[int] | None,
        extras: Sequence[Tensor],
        rows: Sequence[int] | None,
    ) -> list[Tensor] | None:
        n = tokens.shape[1]
        if n > LONGEST:
            return None
        if self._begins(counts, rows):
            self._units.begin()
        code = self._units.find(unit, extras)
        if code is None:
            return None
        if rows is None:
            made = self._step(tokens, counts, True, ())
        else:
            made = self._step_some(tokens, [n] * len(rows) if counts is None else counts, True, rows, ())
        assert made.logits is not None
        return code([made.logits.contiguous(), made.hidden.contiguous(), *extras])
