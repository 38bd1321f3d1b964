"""Captured units as plain Python, for ``--smoke``: what would be compiled runs, and no compiler is needed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from sprinter.models.capture.compiled import Compiled, Recipe
from sprinter.models.capture.results import _AfterPass
from sprinter.models.capture.runner import as_module, split_inputs
from sprinter.models.capture.trace import RowPass, own_attention


def compile_nothing() -> None:
    """From now on every captured unit of this process runs eagerly."""
    for module in ("units", "results"):
        patch(f"sprinter.models.capture.{module}.find_compiled", _find).start()
    patch("sprinter.engine.captured.compile_together", lambda recipes: None).start()


def _find(recipe: Recipe, may_compile: bool) -> Compiled:
    unit: Any = recipe.unit
    if recipe.model is None:
        results = _AfterPass(unit)
        return lambda inputs: list(results(*inputs[:2], inputs[2:]))
    model = recipe.model
    module = as_module(RowPass(model, recipe.facts["windows"], recipe.facts["shape"] == "some"), unit)

    def call(inputs: list[Tensor]) -> list[Tensor]:
        with own_attention(model):
            return list(module(*inputs[:5], *split_inputs(inputs)))

    return call
