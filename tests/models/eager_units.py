"""Units that run as plain Python: what is captured, without a compiler."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from tests.models.tiny import tiny
from torch import Tensor
from transformers import PreTrainedModel

from sprinter.models.capture.compiled import Compiled, Recipe
from sprinter.models.capture.compiled import _key as compiled_key
from sprinter.models.capture.runner import CapturedRunner, Unit, as_module, split_inputs
from sprinter.models.capture.trace import RowPass, own_attention
from sprinter.models.choose import _choose
from sprinter.models.runners.row import Windows


def _eager(model: PreTrainedModel, windows: Windows, unit: Unit, some: bool) -> Compiled:
    module = as_module(RowPass(model, windows, some), unit)

    def call(inputs: list[Tensor]) -> list[Tensor]:
        # Compiled attention is in float32; in float64 the model's own shows the rest to the last bits.
        with nullcontext() if model.dtype == torch.float64 else own_attention(model):
            return list(module(*inputs[:5], *split_inputs(inputs)))

    return call


class EagerUnits:
    """As ``CompiledUnits``, each call made by hand; ``calls`` counts them by the unit's name."""

    def __init__(self, kind: str | PreTrainedModel) -> None:
        self.model = tiny(kind) if isinstance(kind, str) else kind
        self.calls, self.begun = dict[str, int](), 0
        self.windows = _choose(self.model).windows

    def begin(self) -> None:
        self.begun += 1

    def missing(self, unit: Unit, like: Callable[[], Sequence[Tensor]]) -> list[Recipe]:
        return []

    def find(self, unit: Unit, some: bool, like: Sequence[Tensor]) -> Compiled:
        run = _eager(self.model, self.windows, unit, some)

        def call(inputs: list[Tensor]) -> list[Tensor]:
            self.calls[unit.name] = self.calls.get(unit.name, 0) + 1
            return run(inputs)

        return call


def captured(kind: str, batch: int, max_len: int) -> CapturedRunner:
    """A captured runner over ``EagerUnits``."""
    units = EagerUnits(kind)
    return CapturedRunner(units.model, batch, max_len, units.windows, units)


class FrozenCode:
    """Stands for compiler and disk: code is a copy of model and unit as they were, kept under its real key."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.disk: dict[str, Compiled] = {}
        self.looks: list[str] = []
        patch.setattr("sprinter.models.capture.units.find_compiled", self.find)
        patch.setattr("sprinter.engine.captured.compile_together", lambda recipes: None)

    def find(self, recipe: Recipe, may_compile: bool) -> Compiled | None:
        key = compiled_key(recipe)
        self.looks.append(key)
        if key not in self.disk and may_compile:
            unit, some = recipe.unit, recipe.facts["shape"] == "some"
            assert isinstance(unit, Unit)
            self.disk[key] = _eager(deepcopy(recipe.model), recipe.facts["windows"], deepcopy(unit), some)
        return self.disk.get(key)
