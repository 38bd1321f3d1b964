"""The captured runner: a row runner whose short forward passes are captured, as CUDA graphs.

A *unit* is a function of tensors around one forward pass: the forward pass alone, or a whole draft step. Long forward
passes and the first one of a runner, which allocates the buffers, are those of the row runner, over the same buffers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.models.capture.trace import RowPass
from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import StateFilter
from sprinter.models.runners.row import RowRunner, Windows
from sprinter.models.runners.tree import RowTree

__all__ = [
    "LONGEST",
    "PASS",
    "Captured",
    "CapturedRunner",
    "ForwardPass",
    "Unit",
    "Units",
    "as_module",
    "split_inputs",
]

ForwardPass = Callable[[StateFilter | None], tuple[Tensor, ...]]
Captured = Callable[[list[Tensor]], list[Tensor]]
"""Flat inputs → flat outputs; buffers among the inputs are written in place."""

LONGEST = 32
"""Maximum number of tokens per row in a captured forward pass; longer ones run eagerly."""


class Unit(nn.Module):
    """What is captured: a forward pass, and in subclasses the computation on its results.

    Args:
        name: for messages.
        facts: everything that it depends on besides the model and its own weights, as JSON values.

    Attributes:
        per_token: whether the results are ``[batch, n, ...]``.
        hidden_layers: layers whose states ``run`` returns too, after the other results.
    """

    per_token = True
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str = "pass", **facts: Any) -> None:
        super().__init__()
        self.name = name
        self.key = f"{name} {json.dumps(facts, sort_keys=True)}"

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The unit's results, computed with one call of ``run``.

        Args:
            run: runs the forward pass; returns logits, states and states of ``hidden_layers``. For its argument
                ``keep`` see ``RowPass``.
            extras: the caller's other inputs besides the tokens, each ``[batch, ...]``.
        """
        return run(None)


PASS = Unit()
"""The forward pass alone: logits ``[batch, n, vocab]`` and states ``[batch, n, d]``."""


class ReadUnit(Unit):
    """A forward pass without logits, as in prefill: only states ``[batch, n, d]``."""

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return run(lambda hidden: hidden[:, -1:])[1:]


READ = ReadUnit("read")


@cache
def _unit_of(logits: bool, layers: tuple[int, ...]) -> Unit:
    """``PASS`` or ``READ``, extended by the states of some layers."""
    if not layers:
        return PASS if logits else READ
    unit = Unit("pass", hidden_layers=layers) if logits else ReadUnit("read", hidden_layers=layers)
    unit.hidden_layers = layers
    return unit


class Units(Protocol):
    """Source of captured units."""

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Captured | None:
        """The captured unit for inputs of this shape; None: run eagerly.

        Args:
            unit: the unit to run.
            some: whether only some rows of the buffers take part.
            like: the inputs of the current call: tokens, positions, slots, rows, keys (``[k]``, with trees
                ``[batch, n, k]``), extras, buffers.
        """
        ...


class CapturedRunner(RowRunner):
    """See ``Runner``. ``run`` runs units other than the forward pass alone.

    Args:
        model, batch, max_len, windows: see ``RowRunner``.
        units: source of captured units.
    """

    name = "captured"

    def __init__(
        self, model: PreTrainedModel, batch: int, max_len: int, windows: Windows, units: Units
    ) -> None:
        super().__init__(model, batch, max_len, windows)
        self._units = units
        self._buffers: list[Tensor] = []
        self._keys, self._all_rows = self._positions[0], torch.arange(batch, device=self.device)

    def run(
        self,
        unit: Unit,
        tokens: Tensor,
        counts: Sequence[int] | None,
        extras: Sequence[Tensor] = (),
        rows: Sequence[int] | None = None,
    ) -> list[Tensor] | None:
        """Run a unit over new tokens at the end of each row, or of ``rows``, and keep them, as ``extend`` does.

        Returns:
            The unit's results; None if it is not captured for this shape, and then nothing was done.

        Raises:
            ValueError: see ``extend``.
        """
        made = self.run_steps(unit, tokens, [counts], [extras], rows)
        return made[0] if made else None

    def run_steps(
        self,
        unit: Unit,
        tokens: Tensor,
        counts: Sequence[Sequence[int] | None],
        extras: Sequence[Sequence[Tensor]],
        rows: Sequence[int] | None = None,
    ) -> list[list[Tensor]]:
        """Run a unit several times; each run after the first reads the previous run's first result, ``[batch, 1]``.

        Args:
            unit: the unit to run.
            tokens: ``[batch, n]``, input of the first run.
            counts, extras: one entry for each run.
            rows: see ``extend``; the same in all runs.

        Returns:
            The results of each run; fewer runs than requested if the next one is not captured for its shape.

        Raises:
            ValueError: see ``extend``.
        """
        made: list[list[Tensor]] = []
        if rows is not None and list(rows) == list(range(self.batch)):
            rows = None
        self._check_steps(tokens, counts, rows)
        trees = None
        if self._trees:
            reads = [[1] * len(tokens) if count is None else count for count in counts]
            trees = self._grown(0, [sum(own) for own in zip(*reads, strict=True)], rows, None)
        with torch.inference_mode():
            for count, extra in zip(counts, extras, strict=True):
                n = tokens.shape[1]
                done = self._run(unit, tokens, count, extra, rows)
                if done is None:
                    break
                self._advance(n, count, rows, trees)
                made.append(done)
                tokens = done[0]
        return made

    def _check_steps(
        self, tokens: Tensor, counts: Sequence[Sequence[int] | None], rows: Sequence[int] | None
    ) -> None:
        """Check the arguments of all runs before the first one."""
        n = self._check_extend(tokens, counts[0], rows)
        for i, row in enumerate(range(self.batch) if rows is None else rows):
            more = sum((1 if step else n) if count is None else count[i] for step, count in enumerate(counts))
            if self._lengths[row] + more > self.max_len:
                raise ValueError(
                    f"row {row} would hold {self._lengths[row] + more} tokens; "
                    f"this runner has max_len={self.max_len}"
                )

    def _step(
        self, tokens: Tensor, counts: Sequence[int] | None, logits: bool, layers: Sequence[int]
    ) -> ModelOutput:
        made = self._run(_unit_of(logits, tuple(layers)), tokens, counts, (), None)
        return super()._step(tokens, counts, logits, layers) if made is None else _output(made, logits)

    def _step_some(
        self, tokens: Tensor, counts: Sequence[int], logits: bool, rows: Sequence[int], layers: Sequence[int]
    ) -> ModelOutput:
        made = self._run(_unit_of(logits, tuple(layers)), tokens, counts, (), rows)
        if made is None:
            return super()._step_some(tokens, counts, logits, rows, layers)
        return _output(made, logits)

    def _step_trees(
        self,
        tokens: Tensor,
        counts: Sequence[int] | None,
        logits: bool,
        rows: Sequence[int] | None,
        layers: Sequence[int],
        trees: Sequence[RowTree | None],
    ) -> ModelOutput:
        made = self._run(_unit_of(logits, tuple(layers)), tokens, counts, (), rows, trees)
        if made is None:
            return super()._step_trees(tokens, counts, logits, rows, layers, trees)
        return _output(made, logits)

    def _run(
        self,
        unit: Unit,
        tokens: Tensor,
        counts: Sequence[int] | None,
        extras: Sequence[Tensor],
        rows: Sequence[int] | None,
        trees: Sequence[RowTree | None] | None = None,
    ) -> list[Tensor] | None:
        if tokens.shape[1] > LONGEST:
            return None
        self._find_buffers()
        inputs = [tokens, *self._where(tokens.shape[1], counts, rows, trees), *extras, *self._buffers]
        captured = self._units.find(unit, rows is not None, inputs)
        return None if captured is None else captured(inputs)

    def _find_buffers(self) -> None:
        if not self._buffers:
            if not self._made:
                self._make_buffers()
            self._buffers = self._cache.buffers()

    def _where(
        self,
        n: int,
        counts: Sequence[int] | None,
        rows: Sequence[int] | None,
        trees: Sequence[RowTree | None] | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions, slots, rows and visible keys of a forward pass."""
        if trees is not None:
            places, slots, keys_of = self._tree_pass(n, counts, rows, trees)
            numbers = self._all_rows if rows is None else torch.tensor(rows, device=self.device)
            return places, slots, numbers, keys_of
        if rows is None and self._are_aligned(n, counts):
            start = self._lengths[0]
            places = self._positions.narrow(1, start, n)
            if self.batch > 1:
                places = places.expand(self.batch, n).contiguous()
            return places, places, self._all_rows, self._keys.narrow(0, 0, start + n)
        lengths = self._lengths if rows is None else [self._lengths[row] for row in rows]
        numbers = self._all_rows if rows is None else torch.tensor(rows, device=self.device)
        positions, slots, keys = self._places(n, [n] * len(lengths) if counts is None else counts, lengths)
        return positions, slots, numbers, self._keys.narrow(0, 0, keys)


def _output(made: Sequence[Tensor], logits: bool) -> ModelOutput:
    """The results of a captured forward pass as a ``ModelOutput``, without logits if they were not requested."""
    return (
        ModelOutput(made[0], made[1], tuple(made[2:]))
        if logits
        else ModelOutput(None, made[0], tuple(made[1:]))
    )


def split_inputs(inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split a unit's inputs after the first five into extras and buffers: only buffers have four axes."""
    return [x for x in inputs[5:] if x.dim() < 4], [x for x in inputs[5:] if x.dim() == 4]


def as_module(rows: RowPass, unit: Unit) -> nn.Module:
    """The unit around the forward pass as one module; see ``_Flat.forward`` for its inputs."""
    return _Flat(rows, unit)


class _Flat(nn.Module):
    """A unit around a forward pass as a function of tensors, whose result is a tuple of tensors."""

    def __init__(self, rows: RowPass, unit: Unit) -> None:
        super().__init__()
        self.rows, self.unit = rows, unit

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        numbers: Tensor,
        keys: Tensor,
        extras: list[Tensor],
        buffers: list[Tensor],
    ) -> tuple[Tensor, ...]:
        layers = self.unit.hidden_layers

        def run(keep: StateFilter | None) -> tuple[Tensor, ...]:
            return self.rows(tokens, positions, slots, numbers, keys, buffers, keep, layers)  # type: ignore[no-any-return]

        return self.unit(run, extras)  # type: ignore[no-any-return]
