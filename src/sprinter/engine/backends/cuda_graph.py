"""The same verbs in captured units: a pass and what follows it are one CUDA graph.

Draws are addressed, so that captured and eager steps give the same tokens. Several steps run without host
synchronisation: a step reads the tokens of the previous one on the device. What a runner cannot capture (a long feed, a
head that reads the state at x) runs eagerly, as do rows whose logits are adjusted to their text.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import (
    Drafted,
    DraftRow,
    Epilogue,
    Scored,
    StepResult,
    TargetLaws,
    TargetRow,
    Way,
    alike,
    target_laws,
)  # fmt: skip
from sprinter.engine.backends.eager import EagerBackend
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process_rows
from sprinter.models.capture.runner import LONGEST, CapturedRunner, ForwardPass, Unit
from sprinter.models.interface import Runner
from sprinter.random import AddressedDraws, Purpose, race, race_words

__all__ = ["DraftUnit", "GraphBackend", "TargetUnit", "backend_of"]


def backend_of(runner: Runner, vocab: int, name: str, held: HeldRows | None = None) -> EagerBackend:
    """The backend of a runner; arguments as of ``EagerBackend``."""
    if isinstance(runner, CapturedRunner):
        return GraphBackend(runner, vocab, name, held)
    return EagerBackend(runner, vocab, name, held)


class Settings(NamedTuple):
    """What a unit is told of each row, ``[rows]``: whole numbers, then the others.

    Attributes:
        last: index of the last token of its input. low, high: halves of the address of its draw.
        top_k, temperature, top_p, min_p: as in ``Sampling``. place: in the draft run.
    """

    last: Tensor
    low: Tensor
    high: Tensor
    top_k: Tensor
    temperature: Tensor
    place: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def pack(cls, rows: Sequence[tuple[Sampling, int, int, int]], device: torch.device) -> list[Tensor]:
        """Two inputs of a unit, ``[rows, 4]``, from the sampling, last index, address and place of each row."""
        whole = [(last, key & 0xFFFFFFFF, key >> 32, one.top_k) for one, last, key, _ in rows]
        others = [(one.temperature, place, one.top_p, one.min_p) for one, _, _, place in rows]
        # twice as fast as torch.tensor
        return [
            torch.from_numpy(np.array(values, dtype)).to(device)
            for values, dtype in ((whole, np.int64), (others, np.float64))
        ]

    @classmethod
    def unpack(cls, extras: Sequence[Tensor]) -> Settings:
        """The settings that a unit was given."""
        return cls(*extras[0].unbind(1), *extras[1].unbind(1))

    def process(self, logits: Tensor, truncates: bool, n: int = 1) -> Tensor:
        """``process`` of logits ``[rows * n, V]``, n in a row that are of one row."""
        top_k, temperature, top_p, min_p = (
            one if n == 1 else one.repeat_interleave(n)
            for one in (self.top_k, self.temperature, self.top_p, self.min_p)
        )
        return process_rows(logits, temperature, (top_k, top_p, min_p) if truncates else None)


class _DeviceWay(Way):
    """Laws and draws by settings that are tensors."""

    def __init__(self, settings: Settings, truncates: bool, words: tuple[Tensor, Tensor]) -> None:
        self._settings, self._truncates, self._words = settings, truncates, words

    def process(self, logits: Tensor) -> Tensor:
        return self._settings.process(logits, self._truncates)

    def draw(self, laws: Tensor) -> Tensor:
        return race(laws, self._settings.low, self._settings.high, self._words)

    def settings(self) -> tuple[Tensor, Tensor]:
        return self._settings.place.float(), self._settings.temperature.float()


class DraftUnit(Unit):
    """One draft step: the fields of ``StepResult``, the tokens ``[rows, 1]``.

    Its epilogue reads the signals whose ``capture`` is "always", so that methods share units, and those in ``asked``.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        heads: by kind; none may read the state at x.
        device: the device that it runs on.
        asked: names of further signals, whose ``capture`` is "asked".
    """

    per_token = False

    def __init__(
        self,
        vocab: int,
        truncates: bool,
        heads: Mapping[str, Head],
        device: torch.device,
        asked: Collection[str] = (),
    ) -> None:
        # The heads' weights are parameters of the unit, whose addresses tell units apart.
        own = sorted(heads.items())
        described = {kind: [head.features, repr(head.calibration.to_dict())] for kind, head in own}
        names = [name for name, one in SIGNALS.items() if one.capture == "always" or name in asked]
        super().__init__("draft", vocab=vocab, truncates=truncates, heads=described, signals=names)
        self._vocab, self._truncates = vocab, truncates
        self.heads = nn.ModuleDict(dict(own))
        self.epilogue = Epilogue(tuple(names), tuple(own), raw=True)
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> StepResult:
        """``extras``: packed ``Settings``."""
        settings = Settings.unpack(extras)
        rows = torch.arange(settings.last.shape[0], device=settings.last.device)
        logits, states = run(lambda hidden: hidden[rows, settings.last][:, None])
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        way = _DeviceWay(settings, self._truncates, (self.high, self.low))
        step, _ = self.epilogue.step(logits[:, 0, : self._vocab], states[rows, settings.last], way)
        return step._replace(token=step.token[:, None])


class TargetUnit(Unit):
    """A target forward pass: the fields of ``TargetLaws``, each ``[rows, n, ...]``.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        raw: whether raw laws are wanted.
    """

    def __init__(self, vocab: int, truncates: bool, raw: bool) -> None:
        super().__init__("target", vocab=vocab, truncates=truncates, raw=raw)
        self._vocab, self._truncates, self._raw = vocab, truncates, raw

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: packed ``Settings``. Without raw laws the last field is left out."""
        settings, logits = Settings.unpack(extras), run(None)[0][..., : self._vocab]
        rows, n = logits.shape[:2]
        flat = logits.reshape(rows * n, self._vocab)
        made = target_laws(flat, lambda own: settings.process(own, self._truncates, n), self._raw)
        return tuple(one.view(rows, n, *one.shape[1:]) for one in (made if self._raw else made[:2]))


class GraphBackend(EagerBackend):
    """``EagerBackend`` over a ``CapturedRunner``. ``Drafted.draft_s`` is the time of whole steps, heads included."""

    def __init__(self, runner: CapturedRunner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        super().__init__(runner, vocab, name, held)
        self._captured = runner
        self._draft_units: dict[tuple[bool, tuple[tuple[str, int], ...], frozenset[str]], DraftUnit] = {}
        self._target_units: dict[tuple[bool, bool], TargetUnit] = {}

    def _kind(self, row: DraftRow) -> Hashable:
        return row.plan.reads_x, _can_capture(row)

    def _steps(self, rows: Sequence[DraftRow], n: int) -> list[Drafted | SprinterError]:
        """Draft n tokens in each row, or fewer if the next step is not captured for its shape."""
        if not _can_capture(rows[0]):
            return super()._steps(rows, n)
        began, device = time.perf_counter(), self.runner.device
        heads = {kind: head for row in rows for kind, head in row.plan.heads.items()}
        unit = self._draft_unit(heads, rows)
        feeds = [row.feed for row in rows]
        self.begin(feeds)
        tokens, first = self._padded(feeds)
        made = self._captured.run_steps(
            unit, tokens, [first, *[[1] * len(rows)] * (n - 1)], [_settings(rows, i, device) for i in range(n)],
            [row.row for row in rows],
        )  # fmt: skip
        if not made:
            return super()._steps(rows, n)
        steps = [StepResult(*one)._replace(token=one[0][:, 0]) for one in made]
        drafted = self._fetch(rows, unit.epilogue, steps, None)
        for one in drafted:
            if isinstance(one, Drafted):
                one.draft_s = (time.perf_counter() - began) / len(rows)
        return drafted

    def score(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """See ``EagerBackend``."""
        if any(row.adjust for row in rows) and not all(row.adjust for row in rows):
            found: dict[int, Scored | SprinterError] = {}
            for group in alike(rows, lambda row: row.adjust is None):
                found |= zip(group, self.score([rows[i] for i in group]), strict=True)
            return [found[i] for i in range(len(rows))]
        long = max(len(row.feed.tokens) for row in rows) > LONGEST
        if long or any(row.adjust or row.layers or row.feed.parents is not None for row in rows):
            return super().score(rows)
        began, feeds = time.perf_counter(), [row.feed for row in rows]
        self.begin(feeds)
        tokens, counts = self._padded(feeds)
        extras = Settings.pack([(row.sampling, 0, 0, 1) for row in rows], self.runner.device)
        key = any(_truncates(row.sampling) for row in rows), any(row.raw for row in rows)
        if key not in self._target_units:
            self._target_units[key] = TargetUnit(self.vocab, *key)
        with torch.inference_mode():
            given = self._captured.run(
                self._target_units[key], tokens, counts, extras, [feed.row for feed in feeds]
            )
            if given is None:
                return super().score(rows)
            made = TargetLaws(given[0], given[1], given[-1] if key[1] else given[0])
            # values at padding are undefined
            laws, peaks, raws = ([one[i, :n] for i, n in enumerate(counts)] for one in made)
            return self._scored(rows, counts, laws, raws, torch.cat(peaks), began)

    def _draft_unit(self, heads: Mapping[str, Head], rows: Sequence[DraftRow]) -> DraftUnit:
        truncates = any(_truncates(row.plan.sampling) for row in rows)
        asked = frozenset(
            name for row in rows for name in row.plan.signals if SIGNALS[name].capture == "asked"
        )
        key = (truncates, tuple(sorted((kind, id(head)) for kind, head in heads.items())), asked)
        if key not in self._draft_units:
            self._draft_units[key] = DraftUnit(self.vocab, truncates, heads, self.runner.device, asked)
        return self._draft_units[key]


def _can_capture(row: DraftRow) -> bool:
    few = 0 < len(row.tokens) <= LONGEST
    return row.adjust is None and few and isinstance(row.draws, AddressedDraws) and row.plan.captures


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _settings(rows: Sequence[DraftRow], step: int, device: torch.device) -> list[Tensor]:
    """Packed settings of a step."""
    given = []
    for row in rows:
        assert isinstance(row.draws, AddressedDraws)
        key = row.draws.address(row.round, row.position + step, Purpose.DRAFT, row.draft)
        given.append((row.plan.sampling, 0 if step else len(row.tokens) - 1, key, row.place + step))
    return Settings.pack(given, device)
