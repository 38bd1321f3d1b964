"""Units that run as plain Python: what is captured, without a compiler."""

from collections.abc import Sequence

from tests.models.tiny import tiny
from torch import Tensor

from sprinter.models.captured import CapturedRunner, Unit, as_module, split_inputs
from sprinter.models.choose import _choose
from sprinter.models.compiled import Compiled
from sprinter.models.trace import RowPass, own_attention


class EagerUnits:
    """As ``CompiledUnits``, each call made by hand; ``calls`` counts them by the unit's name."""

    def __init__(self, kind: str) -> None:
        self.model, self.calls = tiny(kind), dict[str, int]()
        self.windows = _choose(self.model).windows

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled:
        module = as_module(RowPass(self.model, self.windows, some), unit)

        def call(inputs: list[Tensor]) -> list[Tensor]:
            self.calls[unit.name] = self.calls.get(unit.name, 0) + 1
            with own_attention(self.model):
                return list(module(*inputs[:5], *split_inputs(inputs)))

        return call


def captured(kind: str, batch: int, max_len: int) -> CapturedRunner:
    """A captured runner over ``EagerUnits``."""
    units = EagerUnits(kind)
    return CapturedRunner(units.model, batch, max_len, units.windows, units)
