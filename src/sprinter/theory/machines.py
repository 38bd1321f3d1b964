"""What passes cost on the machines of a fleet: measured, or by bandwidth and arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import numpy as np

from sprinter.engine.prefix import BLOCK
from sprinter.errors import UserError
from sprinter.theory.load_costs import LoadCosts
from sprinter.theory.settings import FleetSettings

__all__ = ["Costs", "MeasuredPasses", "Roofline", "draft_lengths"]

_USABLE = 0.9  # of a GPU's memory
_LONGEST = 16  # draft tokens of a round


class Costs(Protocol):
    """Seconds of passes.

    Attributes:
        mixed: whether pieces of prompts are read in the same pass as what rows decode.
    """

    mixed: bool

    def target(self, tokens: np.ndarray, prompts: int, held: int) -> float:
        """A pass over ``tokens`` of each row and, if mixed, that many of prompts; ``held``: tokens in the caches."""
        ...

    def draft(self, rows: int, unread: int) -> float:
        """A draft step of so many rows, in a draft whose first step reads ``unread`` tokens."""
        ...

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        """Passes of "target" or "draft" over so many tokens of each row's prompt."""
        ...

    def host(self, events: int, texts: int) -> float:
        """What a step of the engine takes beside passes, by events, and by texts that begin."""
        ...

    def rows(self, settings: FleetSettings, mean: float) -> int:
        """Rows that fit into memory, of texts of so many tokens."""
        ...


def draft_lengths(settings: FleetSettings, costs: Costs) -> list[tuple[int, int, int]]:
    """The number of draft tokens of an exact round that is fastest, by rows that decode together: first and last number
    of rows, tokens. That is vLLM's ``num_speculative_tokens_per_batch_size``; 0 is plain decoding.

    All rows draft as much at the same time, over texts of mean length; a draft token stays with the chance
    ``settings.accept`` (Leviathan et al. 2023, Eq. 1).
    """
    mean = settings.prompt_tokens + settings.answer_tokens / 2
    found: list[tuple[int, int, int]] = []
    for rows in range(1, costs.rows(settings, settings.prompt_tokens + settings.answer_tokens) + 1):
        step_s = costs.draft(rows, 1)

        def token_s(drafted: int, rows: int = rows, step_s: float = step_s) -> float:
            reading = costs.target(np.full(rows, drafted + 1), 0, int(rows * mean))
            return (drafted * step_s + reading) / sum(settings.accept**i for i in range(drafted + 1))

        best = min(range(_LONGEST + 1), key=token_s)
        first = rows
        if found and found[-1][2] == best:
            first, *_ = found.pop()
        found.append((first, rows, best))
    return found


class MeasuredPasses:
    """Costs that were measured, as the engine runs passes: prompts by themselves, rows as long as the longest.

    Args:
        gated: whether tokens are drafted one by one, with a gate.
    """

    mixed = False

    def __init__(self, costs: LoadCosts, gated: bool = False) -> None:
        self._target, self._draft = ("checks", "gated") if gated else ("target", "draft")
        self._step, self._event, self._text = costs.host
        self._pass = lru_cache(maxsize=None)(costs.seconds)

    def target(self, tokens: np.ndarray, prompts: int, held: int) -> float:
        return self._pass(self._target, len(tokens), int(tokens.max()))

    def draft(self, rows: int, unread: int) -> float:
        return self._pass(self._draft, rows, unread)

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        """Block by block, and in each the rows with about as many tokens in one pass, as the engine reads them."""
        seconds, table = 0.0, "prompts" if model == "target" else "draft_prompts"
        while len(tokens := np.sort(tokens[tokens > 0])[::-1]):
            block = np.minimum(tokens, BLOCK)
            while len(block):
                together = block >= 0.75 * block[0] - 8
                seconds += self._pass(table, int(together.sum()), int(block[0]))
                block = block[~together]
            tokens = tokens - BLOCK
        return seconds

    def host(self, events: int, texts: int) -> float:
        return self._step + self._event * events + self._text * texts

    def rows(self, settings: FleetSettings, mean: float) -> int:
        return settings.rows


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

    def draft(self, rows: int, unread: int) -> float:
        arithmetic = 2 * self._draft * rows * self._flop_s  # each GPU drafts for all rows
        return self._fixed + max(self._draft * self._bytes * self._byte_s, arithmetic)

    def prompts(self, model: str, tokens: np.ndarray) -> float:
        return self.draft(int(tokens.sum()), 1)  # the target reads prompts with all else

    def host(self, events: int, texts: int) -> float:
        return 0.0

    def rows(self, settings: FleetSettings, mean: float) -> int:
        left = _USABLE * settings.memory_gb * 1e9 - self._bytes * (self._target / self._gpus + self._draft)
        fit = int(left * self._gpus / (self._kv * mean)) if self._kv else settings.rows
        if left <= 0 or fit < 1:
            raise UserError(
                f"the weights and one text do not fit into {self._gpus} x {settings.memory_gb:g} GB: give more gpus"
            )
        return min(settings.rows, fit)
