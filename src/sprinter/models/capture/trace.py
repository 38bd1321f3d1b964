"""A model over cache rows as a plain function of tensors, which can be captured, and what is computed around it.

``RowPass`` takes everything that changes from call to call as a tensor (tokens, positions, slots, visible keys, the
cache's buffers) and has no state of its own, so that it can be recorded as a graph. It calls the transformers model
unchanged. A ``Unit`` is a function of tensors around passes: one alone, or a draft run of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn
from transformers import PreTrainedModel

from sprinter.models.kernels import rows_dtype_of
from sprinter.models.runners.forward import StateFilter, call_model, head_of
from sprinter.models.runners.row import RowCache, RowLayer, Span, Windows, mask_dtype, masks_of, window_mask

__all__ = ["PASS", "ForwardPass", "RowPass", "Unit", "as_function", "pass_unit"]


class _RowBuffer(RowLayer):  # type: ignore[no-untyped-call]
    """A layer over buffers; kernels inside of graphs read ``rows``, ``slots`` and ``seen``."""

    def __init__(self, span: Span, buffers: tuple[Tensor, Tensor]) -> None:
        super().__init__(span, buffers)
        assert span.rows is not None
        self.rows, self.slots, self.seen = span.rows[:, 0], span.index, span.keys


class RowPass:
    """One forward pass over rows.

    Args:
        model: a model that the row runner serves.
        windows: the masks that its layers need, by layer type; a single key "": one mask for all.
        gather: True: some rows of the buffers take part, in any order; False: all rows, in order.
    """

    def __init__(self, model: PreTrainedModel, windows: Windows, gather: bool = False) -> None:
        self.model, self._windows, self._gather = model, windows, gather
        self._head, self._mask_dtype = head_of(model), mask_dtype(model)

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        rows: Tensor,
        keys: Tensor,
        buffers: Sequence[Tensor],
        keep: StateFilter | None = None,
        layers: Sequence[int] = (),
    ) -> tuple[Tensor, ...]:
        """Logits ``[batch, n, vocab]`` (of the states that ``keep`` selects), states ``[batch, n, d]``, and the states
        of ``layers``.

        Args:
            tokens: ``[batch, n]``. positions, slots, rows, keys: see ``RowPlaces``.
            buffers: K and V of each layer in turn, ``[batch, heads, slots, d]``; written in place.
        """
        batch, _, slots_held, _ = buffers[0].shape
        cache = RowCache(batch, slots_held - 1, rows_dtype_of(self.model))
        cache.span.keys, cache.span.some = keys.shape[-1], self._gather
        cache.span.index, cache.span.rows = slots, rows[:, None]
        cache.layers = [
            _RowBuffer(cache.span, pair) for pair in zip(buffers[::2], buffers[1::2], strict=True)
        ]
        mask = masks_of(self._windows, lambda window: window_mask(keys, positions, window, self._mask_dtype))
        return call_model(
            self.model,
            self._head,
            tokens,
            keep,
            layers,
            position_ids=positions,
            attention_mask=mask,
            cache=cache,
        )


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A pass of a unit, as a function: logits (of the states that ``keep`` selects), states, and those of layers.

    Attributes:
        tokens: ``[rows, n]`` that the unit was given. layers: whose states it returns.
        positions, slots, rows, keys, buffers: see ``RowPass``.
    """

    run: RowPass
    layers: tuple[int, ...]
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    keys: Tensor
    buffers: Sequence[Tensor]

    def __call__(
        self, keep: StateFilter | None, tokens: Tensor | None = None, at: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Read the unit's tokens, or others ``[rows, n]`` in their place.

        Args:
            at: positions ``[rows]`` of one token of each row, which follow those of the pass before; -1: it is written
                to the spare slot, which is never visible.
        """
        own, places = self.tokens if tokens is None else tokens, (self.positions, self.slots)
        if at is not None:
            spare, place = self.buffers[0].shape[2] - 1, at[:, None]
            places = place.clamp(min=0), place.where(place >= 0, spare)
        return self.run(own, *places, self.rows, self.keys, self.buffers, keep, self.layers)


class Unit(nn.Module):
    """What is captured: a forward pass, and in subclasses the computation on its results.

    Args:
        name: for messages.
        logits: whether ``forward`` gives them: else only states, as in prefill.
        layers: whose states ``run`` returns too, after the other results.

    Attributes:
        per_token: whether the results are ``[batch, n, ...]``.
        passes: number of forward passes; those after the first read one more token of a row each.
    """

    per_token, passes = True, 1

    def __init__(self, name: str, logits: bool = True, layers: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.name, self.logits, self.layers = name, logits, layers

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The unit's results, computed with ``passes`` calls of ``run``.

        Args:
            run: runs a forward pass.
            extras: the caller's other inputs besides the tokens, each ``[batch, ...]``.
        """
        return run(None) if self.logits else run(lambda hidden: hidden[:, -1:])[1:]


@cache
def pass_unit(logits: bool, layers: tuple[int, ...] = ()) -> Unit:
    """The forward pass alone: logits ``[batch, n, vocab]`` if wanted, states ``[batch, n, d]``, those of layers."""
    return Unit("pass" if logits else "read", logits, layers)


PASS = pass_unit(True)


def as_function(run: RowPass, unit: Unit) -> Callable[..., tuple[Tensor, ...]]:
    """A unit around a forward pass, as a function of the fields of ``Inputs``, and of memory for its results."""

    def call(
        tokens: Tensor, positions: Tensor, slots: Tensor, rows: Tensor, keys: Tensor,
        extras: Sequence[Tensor], buffers: Sequence[Tensor], into: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        forward = ForwardPass(run, unit.layers, tokens, positions, slots, rows, keys, buffers)
        made: tuple[Tensor, ...] = unit(forward, extras)
        return made if into is None else tuple(own.copy_(one) for own, one in zip(into, made, strict=True))

    return call
