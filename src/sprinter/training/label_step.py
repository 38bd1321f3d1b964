"""One step of labelling: the texts of a step, and the labeller that makes a shard of them.

Every engine (local or Ray) runs the same labeller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from sprinter.models.pair import LoadedPair
from sprinter.training.label_settings import LabelSettings
from sprinter.training.prefixes import ORIGINAL, PrefixRow, PrefixWriter
from sprinter.training.prompts import Prompt
from sprinter.training.ray_pool import ModelSource
from sprinter.training.records import Records
from sprinter.training.scoring import make_records
from sprinter.training.shards import shard_bytes

__all__ = ["LabelEngine", "LabelStep", "Labeller", "label_elsewhere", "steps"]

_LOGITS_BYTES = 2 << 30  # of both models' logits that a labeller holds at once, in float32


@dataclass(frozen=True, slots=True)
class LabelStep:
    """The texts of one shard."""

    number: int
    rows: tuple[PrefixRow, ...]


class Labeller:
    """Make the shard of a step.

    Args:
        models: target and draft.
        settings: settings of the data set.
        settings_hash: their hash, which every shard carries.
    """

    def __init__(self, models: LoadedPair, settings: LabelSettings, settings_hash: str) -> None:
        self._writer = PrefixWriter(models, settings.seed, settings.temperature)
        self._seed, self._hash, self._eos_ids = settings.seed, settings_hash, models.target.eos_ids
        self._at_once = max(1, _LOGITS_BYTES // (2 * 4 * models.vocab_size * settings.new_tokens))

    def __call__(self, step: LabelStep) -> bytes:
        """Label the texts of a step and return the bytes of its shard file."""
        firsts = range(0, len(step.rows), self._at_once)
        records = Records.concat([self._records(step.rows[i : i + self._at_once]) for i in firsts])
        tokens = sum(len(row.ids) + len(row.original) for row in step.rows)
        counts = {"prompts": len({row.prompt for row in step.rows}), "tokens": tokens}
        return shard_bytes(records, self._hash, step.number, counts)

    def _records(self, rows: Sequence[PrefixRow]) -> Records:
        return make_records(rows, self._writer(rows), self._seed, self._eos_ids)


def label_elsewhere(
    source: ModelSource, settings: LabelSettings, settings_hash: str
) -> Callable[[LabelStep], tuple[int, bytes]]:
    """What turns a step into its number and shard on a worker; arguments as of ``Labeller``."""
    labeller = Labeller(source.load(), settings, settings_hash)
    return lambda step: (step.number, labeller(step))


LabelEngine = Callable[[Iterable[LabelStep]], Iterator[tuple[int, bytes]]]
"""Runs steps and yields (number, shard) of each, in any order."""


def steps(prompts: Iterator[Prompt], settings: LabelSettings) -> Iterator[LabelStep]:
    """Group prompts into steps: step i holds prompts [i·B, (i+1)·B), B = batch_size / classes of a prompt."""
    every = len(settings.kinds) if settings.classes_per_prompt > 1 else 1
    number, used = 0, 0
    while part := list(islice(prompts, ceil(settings.batch_size / every))):
        rows = []
        for prompt in part:
            kinds = [kind for kind in settings.kinds if prompt.original or kind != ORIGINAL]
            kinds = kinds if settings.classes_per_prompt > 1 else [kinds[used % len(kinds)]]
            original = prompt.original or (0,) * settings.new_tokens  # replaced by what the models write
            rows += [PrefixRow(prompt.index, kind, prompt.ids, original) for kind in kinds]
            used += 1
        yield LabelStep(number, tuple(rows))
        number += 1
