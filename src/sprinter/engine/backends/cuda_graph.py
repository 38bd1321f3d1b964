"""The same verbs in captured units: a draft run, or a target pass and what follows it, is one CUDA graph.

A run of n steps is one launch: each step reads the token of the one before on the device, rows whose run is over take
no part in those that follow, and one small copy brings the host all that it reads of the run. Where the target's
verdict on the run follows in any case, its pass is launched behind the run, before that copy. Draws are addressed, so
that captured and eager steps give the same tokens. What a runner cannot capture (a long feed, a head that reads the
state at x) runs eagerly, as do rows whose logits are adjusted to their text.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.run_rules import DeviceRules
from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow, Scored, TargetRow
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, in_line
from sprinter.engine.backends.graph_units import (
    ChainUnit,
    DraftUnit,
    Settings,
    TargetUnit,
    chain_lines,
    draft_lines,
)
from sprinter.engine.backends.single_call import SingleCallBackend
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.laws import Sampling
from sprinter.models.capture.graphs import LADDER
from sprinter.models.capture.runner import CapturedRunner, PreparedPass
from sprinter.models.interface import Runner
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws

__all__ = ["GraphBackend", "backend_of", "join"]

_MOST_UNITS = 64  # of draft runs, that one model keeps
LONGEST = 8
"""Number of draft steps in a launch, at most: longer runs are several."""
_SYNC = 1.0
"""What a question costs in draft steps: on an H100 a step of 1.2 B cost twice its pass. Rows share both."""


def backend_of(runner: Runner, vocab: int, name: str, held: HeldRows | None = None) -> EagerBackend:
    """The backend of a runner; arguments as of ``EagerBackend``."""
    if isinstance(runner, CapturedRunner):
        return GraphBackend(runner, vocab, name, held)
    if isinstance(runner, RowRunner) and runner.drafts(1):
        return SingleCallBackend(runner, vocab, name, held)
    return EagerBackend(runner, vocab, name, held)


class GraphBackend(EagerBackend):
    """``EagerBackend`` over a ``CapturedRunner``. ``Drafted.draft_s`` is the time of whole steps, heads included.

    Attributes:
        judge: the target's backend, if draft runs can go on to its verdict; see ``join``.
    """

    sync, decides = _SYNC, True
    judge: GraphBackend | None = None

    def __init__(self, runner: CapturedRunner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        super().__init__(runner, vocab, name, held)
        self._captured = runner

    def _kind(self, row: DraftRow) -> Hashable:
        goes_on = self.judge is not None and row.chain is not None and row.chain.rule
        return super()._kind(row), _can_capture(row), goes_on

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        """In one launch, or two with the target's verdict; step by step, if that is not captured for its shape."""
        if not _can_capture(rows[0]):
            return super()._draft(rows)
        judge = None if rows[0].chain is None else self.judge
        # Inputs are copied to the device before anything is launched: each copy waits for what runs there.
        began, chains = time.perf_counter(), None if judge is None else judge.chains(rows)
        run = self._launch(rows)
        if run is None:
            return super()._draft(rows)
        target_s, judged, flat = 0.0, None, run.numbers.flatten(1)
        if judge is not None and chains is not None:
            clock = _Clock(self.runner.device)
            judged = judge.launch_chains(chains, run)
            clock.stop()
        if judged is not None:
            flat = torch.cat([flat, judged[0]], 1)
        numbers = flat.cpu().numpy()  # the host synchronisation
        answers = self._fetch_run(rows, run, numbers)
        if judge is not None and judged is not None:
            target_s, size = clock.seconds, run.numbers[0].numel()
            answers = judge.fetch_chains(rows, answers, judged, numbers[:, size:], target_s / len(rows))
        drafted = [one for one in answers if isinstance(one, Drafted)]
        each_s = (time.perf_counter() - began - target_s) / max(1, sum(one.passes for one in drafted))
        for one in drafted:
            one.draft_s = one.passes * each_s
        return answers

    def _launch(self, rows: Sequence[DraftRow]) -> _Launched | None:
        """Launch the draft run of some rows; None: it is not captured for its shape."""
        counts = [min(row.count, LONGEST) for row in rows]
        every = {row.rules and row.rules.rules for row in rows if row.count > 1}
        rules = every.pop() if len(every) == 1 else None  # then their counts end the runs, and the loop
        unit = self._draft_unit(rows, max(counts), rules)
        lines = self._on_device(draft_lines(rows, counts, unit.passes, rules))
        feeds = [feed_of(row) for row in rows]
        self.begin(feeds)
        tokens, lengths = self._padded(feeds)
        if (
            unit.passes > 1 and tokens.shape[1] == 1
        ):  # a run begins behind one token or two: one graph for both
            tokens = nn.functional.pad(tokens, (0, 1))
        made = self._captured.run(unit, tokens, lengths, [lines], [row.row for row in rows])
        return None if made is None else _Launched(unit.plan, *made)

    def _fetch_run(
        self, rows: Sequence[DraftRow], run: _Launched, numbers: np.ndarray
    ) -> list[Drafted | SprinterError]:
        """What each row drafted in a run, of which the host has the numbers, before others."""
        answers, columns = list[Drafted | SprinterError](), run.plan.columns
        numbers = numbers[:, : run.numbers[0].numel()].reshape(run.numbers.shape)
        took = numbers[..., 1].sum(1).astype(int).tolist()
        self._captured.went_on({row.row: n - 1 for row, n in zip(rows, took, strict=True)})
        for i, (row, n) in enumerate(zip(rows, took, strict=True)):
            tokens = [int(one) for one in numbers[i, :n, 0]]
            feed, own = feed_of(row, tokens[:-1]), torch.from_numpy(numbers[i, :n, 2:])
            signals = {name: own[:, columns.index(name)] for name in row.plan.columns[1:]}
            raws = run.raws[i, :n] if row.plan.raw else None
            fault = self.check(feed, numbers[i, :n, 2].tolist())
            answers.append(
                fault or Drafted(tokens, run.laws[i, :n], raws, signals, n, len(feed.tokens), None, 0.0, 0.0)
            )
        return answers

    # --- verdicts of the target behind drafts ---
    def chains(self, rows: Sequence[DraftRow]) -> _ChainInput | None:
        """The input of the target pass behind some draft rows; None: it is too long."""
        chains = [row.chain for row in rows if row.chain is not None]
        steps = min(LONGEST, max(row.count for row in rows))
        counts = [len(chain.feed.tokens) + row.count for chain, row in zip(chains, rows, strict=True)]
        if max(counts) > LADDER[-1] or max(row.count for row in rows) > steps:
            return None
        truncates = any(_truncates(chain.sampling) for chain in chains)
        key = self.vocab, truncates, any(chain.raw for chain in chains), chains[0].rule, steps
        kept = self._captured.kept
        unit = kept.get(key) or kept.setdefault(key, ChainUnit(*key, self.runner.device))
        feeds = [chain.feed for chain in chains]
        self.begin(feeds)
        longest = max(counts)
        tokens = [[*feed.tokens, *[0] * (longest - len(feed.tokens))] for feed in feeds]
        given = torch.tensor(tokens, device=self.runner.device)
        prepared = self._captured.prepare(unit, given, counts, [feed.row for feed in feeds])
        return _ChainInput(prepared, self._on_device(chain_lines(rows, chains, steps)))

    def launch_chains(self, chains: _ChainInput, run: _Launched) -> list[Tensor] | None:
        """Launch the target pass behind a draft run: results of ``ChainUnit``; None: it is not captured."""
        return self._captured.launch(chains.prepared, [chains.lines, run.numbers[..., :2], run.laws])

    def fetch_chains(
        self,
        rows: Sequence[DraftRow],
        drafted: Sequence[Drafted | SprinterError],
        made: Sequence[Tensor],
        numbers: np.ndarray,
        seconds: float,
    ) -> list[Drafted | SprinterError]:
        """What rows drafted, with the target's verdicts on it, of which the host has the numbers."""
        answers = list[Drafted | SprinterError]()
        for i, (row, one) in enumerate(zip(rows, drafted, strict=True)):
            if isinstance(one, Drafted) and row.chain is not None:
                feed = row.chain.feed._replace(tokens=[*row.chain.feed.tokens, *one.tokens])
                n, (accepted, token, *peaks) = len(feed.tokens), numbers[i].tolist()
                raw = made[2][i, :n] if row.chain.raw else None
                one.scored = Scored(made[1][i, :n], raw, seconds, token=int(token), accepted=int(accepted))
                one = self.check(feed, peaks[:n]) or one
            answers.append(one)
        return answers

    def _on_device(self, lines: Sequence[Sequence[float]]) -> Tensor:
        return torch.from_numpy(np.array(lines, np.float64)).to(self.runner.device)

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
        extras = [self._on_device([Settings.line(row.sampling) for row in rows])]
        key = self.vocab, any(_truncates(row.sampling) for row in rows), any(row.raw for row in rows)
        unit = self._captured.kept.get(key) or self._captured.kept.setdefault(key, TargetUnit(*key))
        made = self._captured.run(unit, tokens, counts, extras, [feed.row for feed in feeds])
        if made is None:
            return super()._target(rows, counts)
        law, peaks, *raw = (in_line(one, counts) for one in made)
        return law, raw[0] if raw else law, peaks, {}, ()

    def _draft_unit(self, rows: Sequence[DraftRow], steps: int, rules: DeviceRules | None) -> DraftUnit:
        """The unit of a run of some rows."""
        heads = {kind: head for row in rows for kind, head in row.plan.heads.items()}
        truncates = any(_truncates(row.plan.sampling) for row in rows)
        asked = frozenset(
            name for row in rows for name in row.plan.signals if SIGNALS[name].capture == "asked"
        )
        # A head's calibration may change; what it computes with otherwise stays as it was loaded.
        own = tuple((kind, head, repr(head.calibration.to_dict())) for kind, head in sorted(heads.items()))
        kept, key = self._captured.kept, (self.vocab, truncates, own, asked, steps, rules)
        if key not in kept:
            while len(kept) >= _MOST_UNITS:  # requests choose rules' numbers
                kept.pop(next(iter(kept)))
            kept[key] = DraftUnit(self.vocab, truncates, heads, self.runner.device, asked, steps, rules)
        unit = kept[key]
        assert isinstance(unit, DraftUnit)
        return unit


def join(draft: EagerBackend | None, target: EagerBackend | None) -> bool:
    """Have draft runs of one backend go on to the verdict of another, if both are captured on one device; whether they
    do."""
    if not (isinstance(draft, GraphBackend) and isinstance(target, GraphBackend)):
        return False
    if draft.runner.device == target.runner.device:
        draft.judge = target
    return draft.judge is not None


class _Clock:
    """The time of what is launched until it is stopped; known once the host has waited for that."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._notes = device, list[Any]()
        self.stop()

    def stop(self) -> None:
        """Note when what was launched so far is done."""
        if self._device.type != "cuda":
            self._notes.append(time.perf_counter())
            return
        self._notes.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self._notes[-1].record(torch.cuda.current_stream(self._device))

    @property
    def seconds(self) -> float:
        """The time."""
        began, ended = self._notes
        return float(ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3)


class _ChainInput(NamedTuple):
    """The input of a target pass behind a draft run, with zeros in place of drafted tokens; ``lines``: of the unit."""

    prepared: PreparedPass
    lines: Tensor


class _Launched(NamedTuple):
    """A launched draft run: the results of its ``DraftUnit``, and that one's plan."""

    plan: DraftPlan
    numbers: Tensor
    laws: Tensor
    raws: Tensor


def _can_capture(row: DraftRow) -> bool:
    few = 0 < len(row.tokens) <= LADDER[-1]
    return row.adjust is None and few and isinstance(row.draws, AddressedDraws) and row.plan.captures


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
