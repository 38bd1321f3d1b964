"""Units that run as plain Python: what is captured, without a compiler."""

import torch
from tests.models.tiny import tiny
from transformers import PreTrainedModel

from sprinter.models.capture.graphs import Captured, GraphUnits, Inputs
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import RowPass, Unit, as_function
from sprinter.models.choose import _choose


class EagerUnits(GraphUnits):
    """As ``GraphUnits``, each call made by hand; ``calls`` counts them by the unit's name."""

    def __init__(self, kind: str | PreTrainedModel) -> None:
        model = tiny(kind) if isinstance(kind, str) else kind
        super().__init__(model, _choose(model).windows)
        self.calls = dict[str, int]()

    def find(self, unit: Unit, some: bool, like: Inputs) -> Captured:
        made = as_function(RowPass(self.model, self.windows, some), unit)

        def call(inputs: Inputs) -> list[torch.Tensor]:
            self.calls[unit.name] = self.calls.get(unit.name, 0) + 1
            return list(made(*inputs))

        return call


def captured(kind: str, batch: int, max_len: int) -> CapturedRunner:
    """A captured runner over ``EagerUnits``."""
    units = EagerUnits(kind)
    return CapturedRunner(units.model, batch, max_len, units.windows, units)
