"""What passes cost on the machines of a fleet: measured, or by bandwidth and arithmetic."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from sprinter.engine.prefix import BLOCK
from sprinter.errors import UserError
from sprinter.theory.passes import LoadCosts
from sprinter.theory.settings import FleetSettings

__all__ = ["Costs", "MeasuredPasses", "Roofline"]

_USABLE = 0.9  # of a GPU's memory


class Costs(Protocol):
    """Seconds of passes.

    Attributes:
        mixed: whether pieces of prompts are read in the same pass as what rows decode.
    """

    mixed: bool

    def target(self, tokens: np.ndarray, prompts: int, held: int) -> float:
        """A pass over ``tokens`` of each row and, if mixed, that many of prompts; ``held``: tokens in the caches."""
        ...

    def draft(self, rows: int) -> float:
        """A draft step of so many rows."""
        ...

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        """Passes of "target" or "draft" over so many tokens of each row's prompt."""
        ...

    def step(self) -> float:
        """What a step of the engine takes beside passes."""
        ...

    def rows(self, settings: FleetSettings, mean: float) -> int:
        """Rows that fit into memory, of texts of so many tokens."""
        ...


class MeasuredPasses:
    """Costs that were measured, as the engine runs passes: prompts by themselves, rows as long as the longest.

    Args:
        gated: whether draft steps run the gate.
    """

    mixed = False

    def __init__(self, costs: LoadCosts, gated: bool = False) -> None:
        self._costs, self._steps = costs, costs.gated if gated else costs.draft
        self._step, self._row, self._drafted = costs.host
        self._pass = lru_cache(maxsize=None)(self._of)

    def _of(self, model: str, rows: int, tokens: int) -> float:
        """A pass, between those that were measured on lines, and beyond on those of the last two."""
        grid = self._costs.target if model == "target" else self._costs.prompts
        return _along(self._costs.rows, [_along(self._costs.tokens, line, tokens) for line in grid], rows)

    def target(self, tokens: np.ndarray, prompts: int, held: int) -> float:
        return self._pass("target", len(tokens), int(tokens.max())) + self._row * len(tokens)

    def draft(self, rows: int) -> float:
        return _along(self._costs.rows, self._steps, rows) + self._drafted * rows

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        """Block by block, and in each the rows with about as many tokens in one pass, as the engine reads them."""
        seconds = 0.0
        while len(tokens := np.sort(tokens[tokens > 0])[::-1]):
            block = np.minimum(tokens, BLOCK)
            while len(block):
                together = block >= 0.75 * block[0] - 8
                seconds += self._pass(model, int(together.sum()), int(block[0]))
                block = block[~together]
            tokens = tokens - BLOCK
        return seconds

    def step(self) -> float:
        return self._step

    def rows(self, settings: FleetSettings, mean: float) -> int:
        return settings.rows


def _along(at: Sequence[float], seconds: Sequence[float], x: float) -> float:
    right = min(len(at) - 1, max(1, bisect_right(at, x)))
    low, high = seconds[right - 1], seconds[right]
    value = low + (high - low) * (x - at[right - 1]) / (at[right] - at[right - 1])
    return max(high, value) if x > at[-1] else value


class Roofline:
    """Costs of GPUs from bandwidth and arithmetic: a pass takes the longer of reading all weights and computing, and
    reads the caches. Arithmetic of attention and the draft's caches are left out."""

    mixed = True

    def __init__(self, settings: FleetSettings) -> None:
        one = settings
        self._fixed = one.pass_ms / 1e3
        self._byte_s = 1e-12 / (one.bandwidth * one.efficiency)  # on one GPU
        self._flop_s, self._gpus = 1e-12 / (one.tflops * one.efficiency), one.gpus
        assert one.parameters is not None
        self._target, self._draft = one.parameters * 1e9, one.draft_parameters * 1e9
        self._bytes, self._kv = one.weight_bits / 8, one.kv_kib * 1024

    def target(self, tokens: np.ndarray, prompts: int, held: int) -> float:
        read = int(tokens.sum()) + prompts
        weights = max(self._target * self._bytes * self._byte_s, 2 * self._target * read * self._flop_s)
        return self._fixed + (weights + held * self._kv * self._byte_s) / self._gpus

    def draft(self, rows: int) -> float:
        arithmetic = 2 * self._draft * rows * self._flop_s  # each GPU drafts for all rows
        return self._fixed + max(self._draft * self._bytes * self._byte_s, arithmetic)

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        return self.draft(int(tokens.sum()))  # the target reads prompts with all else

    def step(self) -> float:
        return 0.0

    def rows(self, settings: FleetSettings, mean: float) -> int:
        left = _USABLE * settings.memory_gb * 1e9 - self._bytes * (self._target / self._gpus + self._draft)
        fit = int(left * self._gpus / (self._kv * mean)) if self._kv else settings.rows
        if left <= 0 or fit < 1:
            raise UserError(
                f"the weights and one text do not fit into {self._gpus} x {settings.memory_gb:g} GB: give more gpus"
            )
        return min(settings.rows, fit)
