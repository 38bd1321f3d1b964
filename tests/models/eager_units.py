"""Units that run as plain Python: what is captured, without a compiler."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from tests.models.tiny import tiny
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.models.captured import CapturedRunner, Unit, as_module, split_inputs
from sprinter.models.choose import _choose
from sprinter.models.compiled import Compiled
from sprinter.models.trace import RowPass, own_attention


class EagerUnits:
    """As ``CompiledUnits``, each call made by hand; ``calls`` counts them by the unit's name."""

    def __init__(self, kind: str | PreTrainedModel) -> None:
        self.model = tiny(kind) if isinstance(kind, str) else kind
        self.calls = dict[str, int]()
        self.windows = _choose(self.model).windows

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled:
        module = as_module(RowPass(self.model, self.windows, some), unit)

        def call(inputs: list[Tensor]) -> list[Tensor]:
            self.calls[unit.name] = self.calls.get(unit.name, 0) + 1
            # Compiled attention is in float32; in float64 the model's own shows the rest to the last bits.
            with nullcontext() if self.model.dtype == torch.float64 else own_attention(self.model):
                return list(module(*inputs[:5], *split_inputs(inputs)))

        return call


def captured(kind: str, batch: int, max_len: int) -> CapturedRunner:
    """A captured runner over ``EagerUnits``."""
    units = EagerUnits(kind)
    return CapturedRunner(units.model, batch, max_len, units.windows, units)
