"""Draft steps and target forward passes as captured units: forward pass, laws, draws, heads and signals in one.

Draws are addressed, so that captured and eager steps give the same tokens. Several steps run without host
synchronisation: a step reads the tokens of the previous one on the device, and all results are copied to the host at
the end. What a runner cannot capture (a long feed, a head that reads the state at x) runs eagerly, as do rows whose
logits are adjusted to their text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.signals import SIGNALS, read_signals
from sprinter.engine.rows import CacheRows, RowInput
from sprinter.engine.steps import (
    Drafted,
    DraftPlan,
    DraftRow,
    DraftSteps,
    EagerDraftSteps,
    EagerTargetPasses,
    Scored,
    TargetPasses,
    TargetRow,
    later,
)  # fmt: skip
from sprinter.errors import SprinterError
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process_rows, raw_law
from sprinter.models.capture.runner import LONGEST, CapturedRunner, ForwardPass, Unit
from sprinter.random import AddressedDraws, Purpose, race, race_words

__all__ = [
    "CapturedDraftSteps",
    "CapturedTargetPasses",
    "DraftUnit",
    "TargetUnit",
    "captured_steps",
]


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


class DraftUnit(Unit):
    """One draft step: token ``[rows, 1]``, processed law and raw law ``[rows, V]``, numbers ``[rows, columns]``.

    Columns: the largest logit, the signals whose ``capture`` is "always", the signals in ``asked``, scores of heads in
    order.

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
        described = {
            kind: [head.features, repr(head.calibration.to_dict())] for kind, head in sorted(heads.items())
        }
        names = [name for name, one in SIGNALS.items() if one.capture == "always" or name in asked]
        super().__init__("draft", vocab=vocab, truncates=truncates, heads=described, signals=names)
        self._vocab, self._truncates = vocab, truncates
        self.heads = nn.ModuleDict({kind: heads[kind] for kind in sorted(heads)})
        self._signals = tuple(names)
        self._columns = {name: 1 + i for i, name in enumerate((*names, *sorted(heads)))}
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: integers ``[rows, 4]`` and floats ``[rows, 4]``, as made by ``_settings``."""
        last, key_low, key_high, top_k = extras[0].unbind(1)
        temperature, place, top_p, min_p = extras[1].unbind(1)
        rows = torch.arange(last.shape[0], device=last.device)
        logits, states = run(lambda hidden: hidden[rows, last][:, None])
        logits, hidden = logits[:, 0, : self._vocab], states[rows, last]
        raw = raw_law(logits)
        law = process_rows(logits, temperature, (top_k, top_p, min_p) if self._truncates else None)
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        token = race(law, key_low, key_high, (self.high, self.low))
        step = DraftStep(hidden, raw, place.float(), token, temperature=temperature.float())
        columns = [
            logits.amax(-1), *read_signals(self._signals, law, raw, token, hidden).values(),
            *(head.score(read_features(head.features, step)) for head in self._in_order()),
        ]  # fmt: skip
        return token[:, None], law, raw, torch.stack([column.to(law.dtype) for column in columns], 1)

    def _in_order(self) -> list[Head]:
        return [head for head in self.heads.values() if isinstance(head, Head)]

    def named(self, plan: DraftPlan, numbers: Sequence[float]) -> dict[str, float]:
        """The signals and scores in the row's plan, by name."""
        columns = self._columns
        return {name: numbers[columns[name]] for name in (*plan.signals, *plan.heads)}


class TargetUnit(Unit):
    """A target forward pass: processed laws ``[rows, n, V]``, largest logits ``[rows, n]``, and raw laws if asked.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        raw: whether raw laws are wanted.
    """

    def __init__(self, vocab: int, truncates: bool, raw: bool) -> None:
        super().__init__("target", vocab=vocab, truncates=truncates, raw=raw)
        self._vocab, self._truncates, self._raw = vocab, truncates, raw

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: as for ``DraftUnit``."""
        logits = run(None)[0][..., : self._vocab]
        rows, n = logits.shape[:2]
        flat = logits.reshape(rows * n, self._vocab)
        top_k = extras[0][:, 3].repeat_interleave(n)
        temperature, _, top_p, min_p = extras[1].repeat_interleave(n, 0).unbind(1)
        law = process_rows(flat, temperature, (top_k, top_p, min_p) if self._truncates else None)
        made = law.view(rows, n, -1), logits.amax(-1)
        return (*made, raw_law(flat).view(rows, n, -1)) if self._raw else made


def _settings(
    sampling: Sampling, last: int = 0, key: int = 0, place: int = 1
) -> tuple[list[int], list[float]]:
    """Inputs of a unit for a row: index of the last token, address, top_k; temperature, place in run, top_p, min_p."""
    whole = [last, key & 0xFFFFFFFF, key >> 32, sampling.top_k]
    return whole, [sampling.temperature, place, sampling.top_p, sampling.min_p]


class CapturedDraftSteps:
    """Draft steps in captured units, several per host synchronisation; see ``DraftSteps``.

    ``Drafted.draft_s`` is the time of the whole step, heads included.

    Args:
        rows: of any runner; steps run eagerly unless it is a ``CapturedRunner``.
    """

    def __init__(self, rows: CacheRows) -> None:
        self._rows, self._eager = rows, EagerDraftSteps(rows)
        self._units: dict[tuple[bool, tuple[tuple[str, int], ...], frozenset[str]], DraftUnit] = {}

    def __call__(self, rows: Sequence[DraftRow]) -> list[list[Drafted] | SprinterError]:
        """See ``DraftSteps``."""
        if any(row.adjust for row in rows):
            return _apart(rows, self, self._eager)
        runner = self._rows.runner
        heads = {kind: head for row in rows for kind, head in row.plan.heads.items()}
        if not isinstance(runner, CapturedRunner) or not all(_can_capture(row, heads) for row in rows):
            return self._eager(rows)
        asked = frozenset[str]().union(*(row.plan.asked_signals for row in rows))
        unit = self._unit(heads, any(_truncates(row.plan.sampling) for row in rows), asked, runner)
        with torch.inference_mode():
            made, drafted = self._draft(runner, unit, rows)
        whole: list[list[Drafted] | SprinterError] = list(drafted)
        rest = {i: own for i, own in enumerate(drafted) if isinstance(own, list) and rows[i].count > len(own)}
        if rest:
            # Rows with a larger count continue without the others; steps that are not captured run eagerly.
            go_on = self if made == _common(rows) else self._eager
            later = go_on([_rest(rows[i], own) for i, own in rest.items()])
            for (i, own), more in zip(rest.items(), later, strict=True):
                whole[i] = more if isinstance(more, SprinterError) else own + more
        return whole

    def _draft(
        self, runner: CapturedRunner, unit: DraftUnit, rows: Sequence[DraftRow]
    ) -> tuple[int, list[list[Drafted] | SprinterError]]:
        """The number of captured steps that ran, and their results for each row."""
        began, steps = time.perf_counter(), _common(rows)
        self._rows.begin([row.feed for row in rows])
        extras = list(zip(*_all_settings(rows, steps, runner), strict=True))
        tokens, first = _padded([row.feed for row in rows], runner)
        counts = [first, *[[1] * len(rows)] * (steps - 1)]
        made = runner.run_steps(unit, tokens, counts, extras, [row.row for row in rows])
        if not made:
            return 0, [[] for _ in rows]
        return len(made), self._fetch(rows, unit, made, began)

    def _fetch(
        self, rows: Sequence[DraftRow], unit: DraftUnit, made: list[list[Tensor]], began: float
    ) -> list[list[Drafted] | SprinterError]:
        """Copy the results of the steps to the host, in one synchronisation."""
        if self._rows.runner.device.type == "cpu":
            ids, numbers = ([step[kind].tolist() for step in made] for kind in (0, 3))
        else:
            ids, numbers = (torch.stack([step[kind] for step in made]).tolist() for kind in (0, 3))
        seconds = (time.perf_counter() - began) / (len(rows) * len(made))
        drafted: list[list[Drafted] | SprinterError] = []
        for i, row in enumerate(rows):
            own: list[Drafted] = []
            for step in range(len(made)):
                _, law, raw, _ = made[step]
                signals = unit.named(row.plan, numbers[step][i])
                feed = [len(row.tokens) if step == 0 else 1]
                own.append(
                    Drafted(
                        ids[step][i][0],
                        law[i],
                        raw[i] if row.plan.raw else None,
                        signals,
                        feed,
                        None,
                        seconds,
                    )
                )
            peaks = [step[i][0] for step in numbers]
            read = row.feed._replace(tokens=[*row.tokens, *(step[i][0] for step in ids[:-1])])
            drafted.append(self._rows.check(read, peaks) or own)
        return drafted

    def _unit(
        self, heads: Mapping[str, Head], truncates: bool, asked: frozenset[str], runner: CapturedRunner
    ) -> DraftUnit:
        key = (truncates, tuple(sorted((kind, id(head)) for kind, head in heads.items())), asked)
        if key not in self._units:
            self._units[key] = DraftUnit(self._rows.vocab, truncates, heads, runner.device, asked)
        return self._units[key]


class CapturedTargetPasses:
    """Target forward passes in captured units; see ``TargetPasses``.

    Args:
        rows: of any runner; forward passes run eagerly unless it is a ``CapturedRunner``.
    """

    def __init__(self, rows: CacheRows) -> None:
        self._rows, self._eager = rows, EagerTargetPasses(rows)
        self._units = {
            (truncates, raw): TargetUnit(rows.vocab, truncates, raw)
            for truncates in (False, True)
            for raw in (False, True)
        }

    def __call__(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """See ``TargetPasses``."""
        if any(row.adjust for row in rows):
            return _apart(rows, self, self._eager)
        runner, feeds = self._rows.runner, [row.feed for row in rows]
        plain = all(row.feed.parents is None and not row.layers for row in rows)
        if (
            not isinstance(runner, CapturedRunner)
            or not plain
            or max(len(feed.tokens) for feed in feeds) > LONGEST
        ):
            return self._eager(rows)
        began = time.perf_counter()
        self._rows.begin(feeds)
        with torch.inference_mode():
            tokens, counts = _padded(feeds, runner)
            settings = [_settings(row.sampling) for row in rows]
            extras = [_tensor([one[kind] for one in settings], runner, kind) for kind in (0, 1)]
            unit = self._units[any(_truncates(row.sampling) for row in rows), any(row.raw for row in rows)]
            made = runner.run(unit, tokens, counts, extras, [feed.row for feed in feeds])
        if made is None:
            return self._eager(rows)
        laws, peaks, raws = made[0], made[1].tolist(), made[2] if len(made) > 2 else None
        seconds = (time.perf_counter() - began) / len(rows)
        scored: list[Scored | SprinterError] = []
        for i, (row, feed, n) in enumerate(zip(rows, feeds, counts, strict=True)):
            own = Scored(laws[i, :n], raws[i, :n] if row.raw and raws is not None else None, seconds)
            scored.append(self._rows.check(feed, peaks[i][:n]) or own)  # values at padding are undefined
        return scored


def captured_steps(
    draft: CacheRows | None, target: CacheRows | None
) -> tuple[DraftSteps | None, TargetPasses | None]:
    """See ``StepsOfPair``; eager for runners that capture nothing."""
    drafting: DraftSteps | None = None
    if draft:
        captures = isinstance(draft.runner, CapturedRunner)
        drafting = CapturedDraftSteps(draft) if captures else EagerDraftSteps(draft)
    if not target:
        return drafting, None
    captures = isinstance(target.runner, CapturedRunner)
    return drafting, CapturedTargetPasses(target) if captures else EagerTargetPasses(target)


_Asked = TypeVar("_Asked", DraftRow, TargetRow)
_Made = TypeVar("_Made")
_Way = Callable[[Sequence[_Asked]], list[_Made]]


def _apart(rows: Sequence[_Asked], way: _Way[_Asked, _Made], eager: _Way[_Asked, _Made]) -> list[_Made]:
    """Results in the order of the rows, eager for rows that adjust their logits."""
    done: dict[int, _Made] = {}
    for adjusts, run in ((False, way), (True, eager)):
        group = [i for i, row in enumerate(rows) if (row.adjust is not None) == adjusts]
        if group:
            done |= zip(group, run([rows[i] for i in group]), strict=True)
    return [done[i] for i in range(len(rows))]


def _can_capture(row: DraftRow, heads: Mapping[str, Head]) -> bool:
    alike = all(heads[kind] is head for kind, head in row.plan.heads.items())
    few = 0 < len(row.tokens) <= LONGEST
    return alike and few and isinstance(row.draws, AddressedDraws) and row.plan.captures


def _padded(feeds: Sequence[RowInput], runner: CapturedRunner) -> tuple[Tensor, list[int]]:
    """The rows' unread tokens, padded to ``[rows, n]``, and their counts."""
    unread = [feed.tokens for feed in feeds]
    n = max(map(len, unread))
    padded = [[*tokens, *[0] * (n - len(tokens))] for tokens in unread]
    return torch.tensor(padded, device=runner.device), list(map(len, unread))


def _all_settings(rows: Sequence[DraftRow], steps: int, runner: CapturedRunner) -> list[tuple[Tensor, ...]]:
    """``_settings`` of each step and row: ``steps`` tensors ``[rows, 4]`` of integers, and of floats."""
    table = [[_settings_at(row, step) for row in rows] for step in range(steps)]
    return [
        _tensor([[one[kind] for one in step] for step in table], runner, kind).unbind() for kind in (0, 1)
    ]


def _settings_at(row: DraftRow, step: int) -> tuple[list[int], list[float]]:
    assert isinstance(row.draws, AddressedDraws)
    key = row.draws.address(row.round, row.position + step, Purpose.DRAFT, row.draft)
    return _settings(row.plan.sampling, len(row.tokens) - 1 if step == 0 else 0, key, row.place + step)


def _tensor(values: Any, runner: CapturedRunner, kind: int) -> Tensor:
    # twice as fast as torch.tensor
    made = torch.from_numpy(np.array(values, dtype=(np.int64, np.float64)[kind]))
    return made if runner.device.type == "cpu" else made.to(runner.device)


def _common(rows: Sequence[DraftRow]) -> int:
    """The smallest number of tokens that a row asks for."""
    return min(row.count for row in rows)


def _rest(row: DraftRow, drafted: Sequence[Drafted]) -> DraftRow:
    return later(row, drafted, row.count - len(drafted)) if drafted else row
