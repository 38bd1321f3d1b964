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
from sprinter.engine.backends.base import ChainRow, Drafted, DraftPlan, DraftRow, Scored, TargetRow
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, in_line
from sprinter.engine.backends.graph_units import (
    LONGEST,
    RUN,
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
from sprinter.models.capture.graphs import LADDER, length_bucket
from sprinter.models.capture.runner import CapturedRunner, PreparedPass
from sprinter.models.interface import Runner
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws

__all__ = ["GraphBackend", "backend_of", "draws_alone", "join"]

_MOST_UNITS = 64  # of draft runs, that one model keeps
_NOTHING = DraftPlan(Sampling())
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
        goes_on = self.judge is not None and row.chain is not None and (row.chain.rule, row.chain.trusts)
        return super()._kind(row), _can_capture(row), goes_on

    @torch.inference_mode()
    def draft(  # type: ignore[override]
        self, rows: Sequence[DraftRow | TargetRow]
    ) -> list[Drafted | Scored | SprinterError]:
        """See ``EagerBackend``. Target rows that stand behind the draft rows, and draft nothing, take part in the
        target's pass behind these."""
        own = [row for row in rows if isinstance(row, DraftRow)]
        plain = {i: row for i, row in enumerate(rows) if isinstance(row, TargetRow)}
        found: dict[int, Drafted | Scored | SprinterError] = {}
        for group in alike(own, self._kind):
            made = self._draft([own[i] for i in group], list(plain.values()))
            found |= zip(group, made, strict=False)
            if len(made) > len(group):
                found |= zip(plain, made[len(group) :], strict=True)
                plain = {}
        if plain and self.judge is not None:
            found |= zip(plain, self.judge.score(list(plain.values())), strict=True)
        return [found[i] for i in range(len(rows))]

    def _draft(  # type: ignore[override]
        self, rows: Sequence[DraftRow], plain: Sequence[TargetRow] = ()
    ) -> list[Drafted | Scored | SprinterError]:
        """In one launch, or two with the target's verdict; step by step, if that is not captured for its shape.

        Args:
            plain: other rows of the target, whose results are the last ones if its pass has run.
        """
        if not _can_capture(rows[0]):
            return [*super()._draft(rows)]
        rules, chain = _rules_of(rows), rows[0].chain
        judge = None if chain is None or (chain.trusts and rules is None) else self.judge
        # Inputs are copied to the device before anything is launched: each copy waits for what runs there.
        began = time.perf_counter()
        chains = None if judge is None else judge.chains([*rows, *map(_as_draft, plain)], LONGEST)
        run = self._launch(rows, rules)
        if run is None:
            return [*super()._draft(rows)]
        target_s, judged, flat = 0.0, None, run.numbers.flatten()
        if judge is not None and chains is not None:
            clock = _Clock(self.runner.device)
            judged = judge.launch_chains(chains, run.numbers, run.laws)
            clock.stop()
        if judged is not None:
            flat = torch.cat([flat, judged[0].flatten()])
        numbers, size = flat.cpu().numpy(), run.numbers.numel()  # the host synchronisation
        drafted = self._fetch_run(rows, run, numbers[:size].reshape(run.numbers.shape))
        answers: list[Drafted | Scored | SprinterError] = [*drafted]
        if judge is not None and chains is not None and judged is not None:
            target_s, own = clock.seconds, numbers[size:].reshape(judged[0].shape)
            tokens = [one.tokens if isinstance(one, Drafted) else [] for one in drafted]
            said = judge.fetch_chains(chains, tokens, judged, own, target_s / len(own))
            answers = [_with(one, after) for one, after in zip(drafted, said, strict=False)]
            answers += said[len(rows) :]
        done = [one for one in answers if isinstance(one, Drafted)]
        each_s = (time.perf_counter() - began - target_s) / max(1, sum(one.passes for one in done))
        for one in done:
            one.draft_s = one.passes * each_s
        return answers

    def _launch(self, rows: Sequence[DraftRow], rules: DeviceRules | None) -> _Launched | None:
        """Launch the draft run of some rows; None: it is not captured for its shape."""
        counts = [min(row.count, LONGEST) for row in rows]
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
        """What each row drafted in a run, of which the host has the numbers."""
        answers, columns = list[Drafted | SprinterError](), run.plan.columns
        took = numbers[..., 1].sum(1).astype(int).tolist()
        self._captured.went_on({row.row: n - 1 for row, n in zip(rows, took, strict=True)})
        for i, (row, n) in enumerate(zip(rows, took, strict=True)):
            tokens = [int(one) for one in numbers[i, :n, 0]]
            feed, own = feed_of(row, tokens[:-1]), torch.from_numpy(numbers[i, :n, RUN:])
            signals = {name: own[:, columns.index(name)] for name in row.plan.columns[1:]}
            raws = run.raws[i, :n] if row.plan.raw and run.raws is not None else None
            fault = self.check(feed, numbers[i, :n, RUN].tolist())
            answers.append(
                fault or Drafted(tokens, run.laws[i, :n], raws, signals, n, len(feed.tokens), None, 0.0, 0.0)
            )
        return answers

    # --- verdicts of the target behind drafts ---
    def chains(self, rows: Sequence[DraftRow], most: int = LADDER[-1]) -> _ChainInput | None:
        """The input of the target pass behind some draft rows, which may draft nothing; None: it is too long.

        Args:
            most: largest number of drafted tokens of a row. Without it the number is rounded up.
        """
        chains = [row.chain for row in rows if row.chain is not None]
        counts = [len(chain.feed.tokens) + row.count for chain, row in zip(chains, rows, strict=True)]
        steps = max(row.count for row in rows)
        if max(counts) > LADDER[-1] or steps > most:
            return None
        if most == LADDER[-1] and steps:
            steps = length_bucket(steps) or steps
        truncates = any(_truncates(chain.sampling) for chain in chains)
        metered, raw = any(chain.trusts for chain in chains), any(chain.raw for chain in chains)
        rule = next((chain.rule for chain, row in zip(chains, rows, strict=True) if row.count), "exact")
        key = self.vocab, truncates, raw, rule, steps, metered
        kept = self._captured.kept
        unit = kept.get(key) or kept.setdefault(key, ChainUnit(*key, self.runner.device))
        feeds = [chain.feed for chain in chains]
        self.begin(feeds)
        longest = max(counts)
        tokens = [[*feed.tokens, *[0] * (longest - len(feed.tokens))] for feed in feeds]
        given = torch.tensor(tokens, device=self.runner.device)
        prepared = self._captured.prepare(unit, given, counts, [feed.row for feed in feeds])
        return _ChainInput(rows, prepared, self._on_device(chain_lines(rows, chains, steps)), steps, metered)

    def launch_chains(self, chains: _ChainInput, numbers: Tensor, laws: Tensor) -> list[Tensor] | None:
        """Launch the target pass behind a draft run: results of ``ChainUnit``; None: it is not captured.

        Args:
            numbers: of the run, the first ones of ``DraftUnit``. laws: ``[rows, steps, V]``; both of the first rows.
        """
        drafted = [numbers[..., :RUN], laws] if chains.steps else []
        if more := len(chains.rows) - len(laws):  # rows that draft nothing
            drafted = [nn.functional.pad(one, (0, 0, 0, 0, 0, more)) for one in drafted]
        return self._captured.launch(chains.prepared, [chains.lines, *drafted])

    def fetch_chains(
        self,
        chains: _ChainInput,
        drafted: Sequence[Sequence[int]],
        made: Sequence[Tensor],
        numbers: np.ndarray,
        seconds: float,
    ) -> list[Scored | SprinterError]:
        """What the target says of rows and of the tokens that the first of them drafted; the host has the numbers."""
        answers, steps = list[Scored | SprinterError](), chains.steps if chains.metered else 0
        for i, row in enumerate(chains.rows):
            assert row.chain is not None
            own = drafted[i] if i < len(drafted) else ()
            feed = row.chain.feed._replace(tokens=[*row.chain.feed.tokens, *own])
            n, (accepted, token, trusted, *rest) = len(feed.tokens), numbers[i].tolist()
            raw = made[2][i, :n] if row.chain.raw else None
            scored = Scored(made[1][i, :n], raw, seconds, token=int(token))
            if own:
                scored.accepted, scored.trusted = int(accepted - trusted), int(trusted)
                drifts = zip(rest[:steps], rest[steps : 2 * steps], strict=True)
                scored.metered = dict(enumerate(drifts, row.position))
            answers.append(self.check(feed, rest[2 * steps :][:n]) or scored)
        return answers

    def _judge(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError] | None:
        """``score`` with verdicts, or tokens that follow, in the graph of the pass; None: it is not captured."""
        began, drafts = time.perf_counter(), [*map(_as_draft, rows)]
        if (chains := self.chains(drafts)) is None:
            return None
        numbers = np.zeros((len(rows), chains.steps, RUN))
        like = next((own.laws[0] for row in rows if (own := row.chain)), torch.empty(0))
        laws = like.new_zeros(len(rows), chains.steps, self.vocab)
        for i, row in enumerate(rows):
            if (own := row.chain) is not None:
                n = len(own.tokens)
                numbers[i, :n, 0], numbers[i, :n, 1], numbers[i, : own.trusted, 2] = own.tokens, 1, 1
                torch.cat([*own.laws], out=laws[i, :n])
        made = self.launch_chains(chains, torch.from_numpy(numbers).to(self.runner.device), laws)
        if made is None:
            return None
        tokens = [[] if row.chain is None else row.chain.tokens for row in rows]
        said = made[0].cpu().numpy()  # the host synchronisation
        return self.fetch_chains(chains, tokens, made, said, (time.perf_counter() - began) / len(rows))

    def _on_device(self, lines: Sequence[Sequence[float]]) -> Tensor:
        return torch.from_numpy(np.array(lines, np.float64)).to(self.runner.device)

    def score(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """See ``EagerBackend``; rows whose logits are adjusted, or that another rule judges, have a pass of their
        own."""
        fits = all(row.chain is not None or draws_alone(row) for row in rows)
        rule = next(
            (row.chain.rule for row in rows if row.chain is not None), None
        )  # rows without one join the first
        found: dict[int, Scored | SprinterError] = {}
        for group in alike(
            rows, lambda row: (fits and (row.chain.rule if row.chain else rule), row.adjust is None)
        ):
            own = [rows[i] for i in group]
            with torch.inference_mode():
                made = self._judge(own) if fits else None
            found |= zip(group, super().score(own) if made is None else made, strict=True)
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
        raw = any(row.plan.raw for row in rows)
        kept, key = self._captured.kept, (self.vocab, truncates, own, asked, steps, raw, rules)
        if key not in kept:
            while len(kept) >= _MOST_UNITS:  # requests choose rules' numbers
                kept.pop(next(iter(kept)))
            kept[key] = DraftUnit(self.vocab, truncates, heads, self.runner.device, asked, steps, raw, rules)
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
    """The input of a target pass behind drafts of at most ``steps`` tokens, with zeros in place of these; ``lines``: of
    the unit; ``metered``: whether it makes drifts."""

    rows: Sequence[DraftRow]
    prepared: PreparedPass
    lines: Tensor
    steps: int
    metered: bool


class _Launched(NamedTuple):
    """A launched draft run: the results of its ``DraftUnit``, and that one's plan."""

    plan: DraftPlan
    numbers: Tensor
    laws: Tensor
    raws: Tensor | None = None


def _can_capture(row: DraftRow) -> bool:
    few = 0 < len(row.tokens) <= LADDER[-1]
    return row.adjust is None and few and isinstance(row.draws, AddressedDraws) and row.plan.captures


def _rules_of(rows: Sequence[DraftRow]) -> DeviceRules | None:
    """The rules that end the runs of some rows; None: the rows' counts do, and the loop."""
    every = {row.rules and row.rules.rules for row in rows if row.count > 1}
    return every.pop() if len(every) == 1 else None


def draws_alone(row: TargetRow) -> bool:
    """Whether a row drafts nothing and wants a token after a few that it reads, and it can be drawn in a graph."""
    few = row.feed.parents is None and len(row.feed.tokens) <= LADDER[-1]
    drawn = row.draw is not None and isinstance(row.draw[0], AddressedDraws)
    return drawn and few and row.adjust is None and not row.layers


def _as_draft(row: TargetRow) -> DraftRow:
    """A row of the target as one behind a draft, or behind none."""
    if (own := row.chain) is not None:
        feed = row.feed._replace(tokens=row.feed.tokens[: len(row.feed.tokens) - len(own.tokens)])
        chain = ChainRow(feed, row.sampling, row.raw, own.rule, own.trusted > 0)
        at = own.position, own.round, own.draws
        return DraftRow(feed.row, (), *at, _NOTHING, count=len(own.tokens), chain=chain)
    assert row.draw is not None
    (draws, round, position), chain = row.draw, ChainRow(row.feed, row.sampling, row.raw, "exact")
    return DraftRow(row.feed.row, (), position, round, draws, _NOTHING, count=0, chain=chain)


def _with(one: Drafted | SprinterError, after: Scored | SprinterError) -> Drafted | SprinterError:
    """What a row drafted, with what the target said of it; or an error of either."""
    if isinstance(one, Drafted) and isinstance(after, Scored):
        one.scored = after
        return one
    return one if isinstance(one, SprinterError) else after  # type: ignore[return-value]


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
