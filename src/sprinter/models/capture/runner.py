"""The captured runner: a row runner whose short forward passes are CUDA graphs, over the same buffers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.models.capture.graphs import LADDER, GraphUnits, Inputs
from sprinter.models.capture.trace import Unit, pass_unit
from sprinter.models.interface import ModelOutput
from sprinter.models.runners.forward import Pass
from sprinter.models.runners.row import RowPlaces, RowRunner, Windows

__all__ = ["CapturedRunner", "PreparedPass"]


class PreparedPass(NamedTuple):
    """A pass of a unit that can be launched; ``places``: None if it is too long for a graph."""

    unit: Unit
    asked: Pass
    places: RowPlaces | None


class CapturedRunner(RowRunner):
    """See ``Runner``. ``run`` runs units other than the forward pass alone.

    Args:
        model, batch, max_len, windows, dtype: see ``RowRunner``.
        units: captures units.

    Attributes:
        kept: units of its callers, by what they depend on; as long as one is the same object, so are its graphs.
    """

    name = "captured"

    def __init__(
        self,
        model: PreTrainedModel,
        batch: int,
        max_len: int,
        windows: Windows,
        units: GraphUnits,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, batch, max_len, windows, dtype=dtype)
        self.kept: dict[Hashable, Unit] = {}
        self._units = units
        self._buffers: list[Tensor] = []

    def run(
        self,
        unit: Unit,
        tokens: Tensor,
        counts: Sequence[int] | None,
        extras: Sequence[Tensor] = (),
        rows: Sequence[int] | None = None,
    ) -> list[Tensor] | None:
        """Run a unit over new tokens at the end of each row, or of ``rows``, and keep them, as ``extend`` does.

        What its further passes read is kept once ``went_on`` says how many tokens it was.

        Returns:
            The unit's results; None if it is not captured for this shape, and then nothing was done.

        Raises:
            ValueError: see ``extend``.
        """
        return self.launch(self.prepare(unit, tokens, counts, rows), extras)

    def prepare(
        self, unit: Unit, tokens: Tensor, counts: Sequence[int] | None, rows: Sequence[int] | None = None
    ) -> PreparedPass:
        """``run`` up to the launch: nothing is copied to the device behind it."""
        asked = self._checked(tokens, counts, rows=rows)
        return PreparedPass(unit, asked, self._seen_places(unit, asked))

    def launch(self, prepared: PreparedPass, extras: Sequence[Tensor] = ()) -> list[Tensor] | None:
        """The rest of ``run``; no other pass has run in between."""
        unit, asked, places = prepared
        with torch.inference_mode():
            made = self._run(unit, asked, places, extras)
            if made is not None:
                self._advance(asked)
        return made

    def went_on(self, counts: Mapping[int, int]) -> None:
        """Note that the last unit's further passes read so many tokens, by row."""
        for row, count in counts.items():
            self._lengths[row] += count

    def _step(self, asked: Pass) -> ModelOutput:
        unit = pass_unit(asked.logits, asked.layers)
        made = self._run(unit, asked, self._seen_places(unit, asked))
        if made is None:
            return super()._step(asked)
        logits = made.pop(0) if asked.logits else None
        return ModelOutput(logits, made[0], tuple(made[1:]))

    def _seen_places(self, unit: Unit, asked: Pass) -> RowPlaces | None:
        """Where its tokens are, with the keys that all passes of a unit see; None: it is too long for a graph."""
        if asked.tokens.shape[1] > LADDER[-1]:
            return None
        places = self._places(asked)
        seen = min(places.keys.shape[-1] + unit.passes - 1, self.max_len)
        return places if unit.passes == 1 else places._replace(keys=self._positions[0, :seen])

    def _run(
        self, unit: Unit, asked: Pass, places: RowPlaces | None, extras: Sequence[Tensor] = ()
    ) -> list[Tensor] | None:
        if places is None:
            return None
        if not self._buffers:
            # A pass over a token of padding, which is written to the spare slot, has all buffers allocated.
            nothing = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            super()._step(Pass(nothing, [0], self.batch == 1, [0], [0], False, ()))
            self._buffers = self._cache.buffers()
        inputs = Inputs(asked.tokens, *places, extras, self._buffers)
        captured = self._units.find(unit, not asked.whole, inputs)
        return None if captured is None else captured(inputs)
