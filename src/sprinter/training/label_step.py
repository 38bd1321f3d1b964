"""One step of labelling: its settings, the texts of a step, and the labeller that makes a shard of them.

Every engine (local or Ray) runs the same labeller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import ceil

from sprinter.decode.checks import at_least, between, one_of, whole
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.models.pair import LoadedPair
from sprinter.training.prefixes import ORIGINAL, PrefixRow, PrefixWriter
from sprinter.training.prompts import Prompt
from sprinter.training.ray_pool import ModelSource
from sprinter.training.records import KINDS, Records
from sprinter.training.scoring import make_records
from sprinter.training.shards import shard_bytes
from sprinter.training.sources import check_reading

__all__ = [
    "CPU_BATCH",
    "GPU_BATCH",
    "LabelEngine",
    "LabelSettings",
    "LabelStep",
    "Labeller",
    "label_elsewhere",
    "steps",
]

CPU_BATCH, GPU_BATCH = 16, 128
"""Usual texts per step: a step is what an interrupted run loses, and on a CPU 128 texts may take many minutes."""

_LOGITS_BYTES = 2 << 30  # of both models' logits that a labeller holds at once, in float32


@dataclass(frozen=True, slots=True)
class LabelSettings:
    """What the records depend on, besides pair and data.

    Args:
        seed: seed of the completions and of the drawn x.
        temperature: sampling temperature of the completions; laws and labels are raw (temperature 1).
        prompt_share: share of a text's words that is its prompt (the paper: 0.3).
        prompt_tokens: maximum prompt length; longer prompts are truncated. 0: no truncation, and prompts beyond the
            context are skipped.
        new_tokens: labelled positions per text (the paper: 20).
        classes_per_prompt: 1: each prompt gets the next of the prefix classes; 4: all of them.
        batch_size: texts per step, which is one shard. Both models' logits of at most 2 GiB are held at once: a step
            that needs more runs in several parts.
        limit: maximum number of texts to read; None: all.
        field: field of a record (JSON lines, Parquet, data sets) that holds its text; None: the first known one.
        split: unit that is one text in a plain text file: "lines", "blank-lines" (paragraphs) or "file".
        chat: every text is a whole prompt, what a user says; prompts go through the chat template.
        system: system message before all prompts, in chat form.
        classes: the prefix classes to label, for example ("target", "draft"): answers that the models write
            themselves; None: all. A prompt without an answer has no text of class "original".
    """

    seed: int = 0
    temperature: float = 1.0
    prompt_share: float = 0.3
    prompt_tokens: int = 128
    new_tokens: int = 20
    classes_per_prompt: int = 1
    batch_size: int = GPU_BATCH
    limit: int | None = None
    field: str | None = None
    split: str = "lines"
    chat: bool = False
    system: str | None = None
    classes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        whole("seed", self.seed)
        Sampling(temperature=self.temperature)
        between("prompt_share", self.prompt_share, 0.0, 1.0)
        for name, low in (("prompt_tokens", 0), ("new_tokens", 1), ("batch_size", 1)):
            at_least(name, getattr(self, name), low)
        if self.classes_per_prompt not in (1, len(KINDS)):
            raise UserError(
                f"classes_per_prompt={self.classes_per_prompt} is out of range: give 1 (in turn) or {len(KINDS)} (all)"
            )
        check_reading(self)
        if self.classes is not None:
            self._set_classes(self.classes)

    def _set_classes(self, classes: Sequence[str]) -> None:
        if isinstance(classes, str) or not classes or len(set(classes)) < len(classes):
            raise UserError(
                f"classes={classes!r} is not a list of different classes: give some of {', '.join(KINDS)}"
            )
        for name in classes:
            one_of("prefix class", name, KINDS)
        object.__setattr__(self, "classes", tuple(classes))

    @property
    def kinds(self) -> tuple[int, ...]:
        """The prefix classes to label, as indices into ``KINDS``."""
        return tuple(KINDS.index(name) for name in self.classes or KINDS)


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
