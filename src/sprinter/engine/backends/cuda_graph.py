"""The same verbs in captured units: a pass and what follows it are one CUDA graph.

Draws are addressed, so that captured and eager steps give the same tokens. Several steps run without host
synchronisation: a step reads the tokens of the previous one on the device. What a runner cannot capture (a long feed, a
head that reads the state at x) runs eagerly, as do rows whose logits are adjusted to their text.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow, Scored, StepResult, TargetRow
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, follow, in_line
from sprinter.engine.backends.single_call import SingleCallBackend
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process_rows, raw_law
from sprinter.models.capture.graphs import LADDER
from sprinter.models.capture.runner import CapturedRunner
from sprinter.models.capture.trace import ForwardPass, Unit
from sprinter.models.interface import Runner
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws, Purpose, race, race_words

__all__ = ["DraftUnit", "GraphBackend", "TargetUnit", "backend_of"]


def backend_of(runner: Runner, vocab: int, name: str, held: HeldRows | None = None) -> EagerBackend:
    """The backend of a runner; arguments as of ``EagerBackend``."""
    if isinstance(runner, CapturedRunner):
        return GraphBackend(runner, vocab, name, held)
    if isinstance(runner, RowRunner) and runner.drafts(1):
        return SingleCallBackend(runner, vocab, name, held)
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


class DraftUnit(Unit):
    """One draft step: the fields of ``StepResult``, the tokens ``[rows, 1]``.

    Its plan has the signals whose ``capture`` is "always", so that methods share units, and those in ``asked``.

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
        super().__init__("draft")
        own = sorted(heads.items())
        names = [name for name, one in SIGNALS.items() if one.capture == "always" or name in asked]
        self._vocab, self._truncates = vocab, truncates
        self.heads = nn.ModuleDict(dict(own))
        self.plan = DraftPlan(Sampling(), tuple(names), dict(own), raw=True)
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> StepResult:
        """``extras``: packed ``Settings``."""
        settings = Settings.unpack(extras)
        rows = torch.arange(settings.last.shape[0], device=settings.last.device)
        logits, states = run(lambda hidden: hidden[rows, settings.last][:, None])
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        said = logits[:, 0, : self._vocab]
        law = settings.process(said, self._truncates)
        token = race(law, settings.low, settings.high, (self.high, self.low))
        told = settings.place.float(), settings.temperature.float()
        step, _ = follow(self.plan, said, states[rows, settings.last], law, token, lambda: told)
        return step._replace(token=token[:, None])


class TargetUnit(Unit):
    """A target forward pass: laws and largest logits after each token ``[rows, n, ...]``, and raw laws if wanted.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        raw: whether raw laws are wanted.
    """

    def __init__(self, vocab: int, truncates: bool, raw: bool) -> None:
        super().__init__("target")
        self._vocab, self._truncates, self._raw = vocab, truncates, raw

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: packed ``Settings``."""
        settings, logits = Settings.unpack(extras), run(None)[0][..., : self._vocab]
        rows, n = logits.shape[:2]
        flat = logits.reshape(rows * n, self._vocab)
        made = [settings.process(flat, self._truncates, n), flat.amax(-1)]
        if self._raw:
            made.append(raw_law(flat))
        return tuple(one.view(rows, n, *one.shape[1:]) for one in made)


class GraphBackend(EagerBackend):
    """``EagerBackend`` over a ``CapturedRunner``. ``Drafted.draft_s`` is the time of whole steps, heads included."""

    def __init__(self, runner: CapturedRunner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        super().__init__(runner, vocab, name, held)
        self._captured = runner

    def _kind(self, row: DraftRow) -> Hashable:
        return super()._kind(row), _can_capture(row)

    def _draft(self, rows: Sequence[DraftRow], unit: Any = None) -> list[Drafted | SprinterError]:
        return super()._draft(rows, self._draft_unit(rows) if _can_capture(rows[0]) else None)

    def _step(
        self, rows: Sequence[DraftRow], step: int, last: tuple[Tensor, ...], unit: Any
    ) -> tuple[list[tuple[DraftPlan, list[int], StepResult, float]], tuple[Tensor, ...]]:
        """A captured step; an eager one, if it is not captured for its shape."""
        if unit is not None:
            if last:
                tokens, counts = last[0][:, None], None
            else:
                feeds = [feed_of(row) for row in rows]
                self.begin(feeds)
                tokens, counts = self._padded(feeds)
            settings = _settings(rows, step, self.runner.device)
            made = self._captured.run(unit, tokens, counts, settings, [row.row for row in rows])
            if made is not None:
                result = StepResult(*made)._replace(token=made[0][:, 0])
                return [(unit.plan, list(range(len(rows))), result, 0.0)], (result.token,)
        return super()._step(rows, step, last, unit)

    def score(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """See ``EagerBackend``; rows whose logits are adjusted have a pass of their own."""
        found: dict[int, Scored | SprinterError] = {}
        for group in alike(rows, lambda row: row.adjust is None):
            found |= zip(group, super().score([rows[i] for i in group]), strict=True)
        return [found[i] for i in range(len(rows))]

    def _target(
        self, rows: Sequence[TargetRow], counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Mapping[int, Tensor], Sequence[Mapping[str, int]]]:
        feeds = [row.feed for row in rows]
        if max(counts) > LADDER[-1] or any(
            row.adjust or row.layers or row.feed.parents is not None for row in rows
        ):
            return super()._target(rows, counts)
        self.begin(feeds)
        tokens, _ = self._padded(feeds)
        extras = Settings.pack([(row.sampling, 0, 0, 1) for row in rows], self.runner.device)
        key = self.vocab, any(_truncates(row.sampling) for row in rows), any(row.raw for row in rows)
        unit = self._captured.kept.get(key) or self._captured.kept.setdefault(key, TargetUnit(*key))
        made = self._captured.run(unit, tokens, counts, extras, [feed.row for feed in feeds])
        if made is None:
            return super()._target(rows, counts)
        law, peaks, *raw = (in_line(one, counts) for one in made)
        return law, raw[0] if raw else law, peaks, {}, ()

    def _draft_unit(self, rows: Sequence[DraftRow]) -> DraftUnit:
        """The unit of all steps of some rows."""
        heads = {kind: head for row in rows for kind, head in row.plan.heads.items()}
        truncates = any(_truncates(row.plan.sampling) for row in rows)
        asked = frozenset(
            name for row in rows for name in row.plan.signals if SIGNALS[name].capture == "asked"
        )
        # A head's calibration may change; what it computes with otherwise stays as it was loaded.
        own = tuple((kind, head, repr(head.calibration.to_dict())) for kind, head in sorted(heads.items()))
        kept, key = self._captured.kept, (self.vocab, truncates, own, asked)
        if key not in kept:
            kept[key] = DraftUnit(self.vocab, truncates, heads, self.runner.device, asked)
        unit = kept[key]
        assert isinstance(unit, DraftUnit)
        return unit


def _can_capture(row: DraftRow) -> bool:
    few = 0 < len(row.tokens) <= LADDER[-1]
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
