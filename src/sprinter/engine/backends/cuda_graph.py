"""The same verbs in captured units: a draft run, or a target pass and what follows it, is one CUDA graph.

A run of n steps is one launch: each step reads the token of the one before on the device, rows whose run is over take
no part in those that follow, and one small copy brings the host all that it reads of the run. Where the target's
verdict on the run follows in any case, its pass is launched behind the run, before that copy. Draws are addressed, so
that captured and eager steps give the same tokens. What a runner cannot capture (a long feed, a head that reads the
state at x) runs eagerly, as do rows whose logits are adjusted to their text.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sprinter.decode.accept.rows import judge_exact, judge_match
from sprinter.decode.run_rules import DeviceRules
from sprinter.decode.signals import SIGNALS
from sprinter.engine.backends.base import (
    ChainRow,
    Drafted,
    DraftPlan,
    DraftRow,
    Scored,
    StepResult,
    TargetRow,
)
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, follow, in_line
from sprinter.engine.backends.single_call import SingleCallBackend, draw_keys
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process_rows, raw_law
from sprinter.models.capture.graphs import LADDER
from sprinter.models.capture.runner import CapturedRunner, PreparedPass
from sprinter.models.capture.trace import ForwardPass, Unit
from sprinter.models.interface import Runner
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws, Purpose, race, race_words

__all__ = ["ChainUnit", "DraftUnit", "GraphBackend", "TargetUnit", "backend_of", "join"]

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


class Settings(NamedTuple):
    """How each row samples, ``[rows]``: as in ``Sampling``. All that a unit is told of a row is one line of float64,
    which holds its whole numbers too; these come first."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @staticmethod
    def line(sampling: Sampling) -> tuple[float, ...]:
        """What a row is told."""
        return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p

    def process(self, logits: Tensor, truncates: bool, n: int = 1) -> Tensor:
        """``process`` of logits ``[rows * n, V]``, n in a row that are of one row."""
        temperature, top_k, top_p, min_p = (one if n == 1 else one.repeat_interleave(n) for one in self)
        return process_rows(logits, temperature, (top_k.long(), top_p, min_p) if truncates else None)


class DraftUnit(Unit):
    """A draft run. Of each step numbers ``[rows, steps, 2 + columns]``, float64: the token, whether the row took part,
    and those of ``StepResult``; then laws and raw laws ``[rows, steps, V]``.

    Its plan has the signals whose ``capture`` is "always", so that methods share units, and those in ``asked``.

    Args:
        vocab: size of the common vocabulary.
        truncates: whether rows may use top-k, top-p or min-p.
        heads: by kind; none may read the state at x.
        device: the device that it runs on.
        asked: names of further signals, whose ``capture`` is "asked".
        steps: number of draft steps.
        rules: end the runs of rows; None: only their counts do.
    """

    per_token = False

    def __init__(
        self,
        vocab: int,
        truncates: bool,
        heads: Mapping[str, Head],
        device: torch.device,
        asked: Collection[str] = (),
        steps: int = 1,
        rules: DeviceRules | None = None,
    ) -> None:
        super().__init__("draft")
        own = sorted(heads.items())
        names = [name for name, one in SIGNALS.items() if one.capture == "always" or name in asked]
        self._vocab, self._truncates, self._rules = vocab, truncates, rules
        self.heads, self.passes = nn.ModuleDict(dict(own)), steps
        self.plan = DraftPlan(Sampling(), tuple(names), dict(own), raw=True)
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: the lines of ``_draft_lines``."""
        (lines,), steps = extras, self.passes
        settings, rest = Settings(*lines[:, :4].unbind(1)), lines[:, 4:]
        last, position, count, place, drafted = rest[:, :5].unbind(1)
        state, keys = tuple(rest[:, 5 : -2 * steps].unbind(1)), rest[:, -2 * steps :].long()
        rows, ends, live = torch.arange(len(lines), device=lines.device), last.long(), count > 0
        token, made = ends, list[tuple[Tensor, Tensor, Tensor]]()
        for step in range(steps):
            if step == 0:
                logits, states = run(lambda hidden: hidden[rows, ends][:, None])
                states = states[rows, ends]
            else:
                at = torch.where(live, position.long() + (step - 1), -1)
                logits, states = run(None, token[:, None], at)
                states = states[:, 0]
            halves = keys[:, step], keys[:, steps + step]
            result = self._after(logits[:, 0, : self._vocab], states, settings, place + step, halves)
            token, numbers = result.token, result.numbers.double()
            took = torch.stack([token.double(), live.double()], 1)
            made.append((torch.cat([took, numbers], 1), result.law, result.raw))
            if self._rules is not None:
                signals = dict(zip(self.plan.columns[1:], numbers[:, 1:].unbind(1), strict=True))
                ended, state = self._rules.ends(signals, drafted.long() + (step + 1), state)
                live = live & ~ended
            live = live & (count > step + 1)
        return tuple(torch.stack(each, 1) for each in zip(*made, strict=True))

    def _after(
        self, said: Tensor, states: Tensor, settings: Settings, place: Tensor, key: tuple[Tensor, Tensor]
    ) -> StepResult:
        """What follows a pass, of which logits and states are left; ``key``: halves of the draws' addresses."""
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        law, told = settings.process(said, self._truncates), (place.float(), settings.temperature.float())
        token = race(law, *key, (self.high, self.low))
        return follow(self.plan, said, states, law, token, lambda: told)[0]


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
        """``extras``: ``Settings``, in lines."""
        return self._laws(run(None)[0], Settings(*extras[0].unbind(1)))

    def _laws(self, logits: Tensor, settings: Settings) -> tuple[Tensor, ...]:
        logits = logits[..., : self._vocab]
        rows, n = logits.shape[:2]
        flat = logits.reshape(rows * n, self._vocab)
        made = [settings.process(flat, self._truncates, n), flat.amax(-1)]
        if self._raw:
            made.append(raw_law(flat))
        return tuple(one.view(rows, n, *one.shape[1:]) for one in made)


class ChainUnit(TargetUnit):
    """A target pass over what is left of texts and drafts behind them, and its verdicts. Numbers ``[rows, 2 + n]``,
    float64: how many tokens of the draft stay, the token that follows them, largest logits; then laws and raw laws
    ``[rows, n, V]``.

    Args:
        vocab, truncates, raw: as of ``TargetUnit``.
        rule: "exact" or "match". steps: largest number of drafted tokens.
        device: the device that it runs on.
    """

    per_token = False

    def __init__(
        self, vocab: int, truncates: bool, raw: bool, rule: str, steps: int, device: torch.device
    ) -> None:
        super().__init__(vocab, truncates, raw)
        self._rule, self._steps = rule, steps
        for name, half in zip(("high", "low"), race_words(vocab, device), strict=True):
            self.register_buffer(name, half, persistent=False)

    def forward(self, run: ForwardPass, extras: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """``extras``: the lines of ``_chain_lines``; of the draft run tokens and who took part, and its laws."""
        (lines, drafted, q), steps = extras, self._steps
        tokens, counts = drafted[..., 0].long(), drafted[..., 1].sum(1).long()
        lead, uniforms, keys = lines[:, 4].long(), lines[:, 5 : 5 + steps], lines[:, 5 + steps :].long()
        each = torch.arange(run.tokens.shape[1], device=lines.device) - lead[:, None]
        own = torch.where(each < 0, run.tokens, tokens.gather(1, each.clamp(0, steps - 1)))
        settings = Settings(*lines[:, :4].unbind(1))
        laws, peaks, *raw = self._laws(run(None, own)[0], settings)
        at = (torch.arange(-1, steps, device=lines.device) + lead[:, None]).clamp(0, laws.shape[1] - 1)
        p = laws.gather(1, at[..., None].expand(-1, -1, self._vocab))
        low, high = (half.flatten() for half in keys.view(len(keys), 2, -1).unbind(1))
        assert isinstance(self.high, Tensor) and isinstance(self.low, Tensor)
        words = self.high, self.low

        def draw(law: Tensor, places: Tensor) -> Tensor:
            return race(law, low[places], high[places], words)

        if self._rule == "exact":
            accepted, token = judge_exact(p, q, tokens, counts, uniforms, draw)
        else:
            accepted, token = judge_match(p, tokens, counts, draw)
        verdict = torch.stack([accepted, token], 1).double()
        return torch.cat([verdict, peaks.double()], 1), laws, *raw


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
        lines = self._on_device(_draft_lines(rows, counts, unit.passes, rules))
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
        return _ChainInput(prepared, self._on_device(_chain_lines(rows, chains, steps)))

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


def _draft_lines(
    rows: Sequence[DraftRow], counts: Sequence[int], steps: int, rules: DeviceRules | None
) -> list[list[float]]:
    """What a ``DraftUnit`` is told of each row: settings, index of the last token of its input, position and number of
    tokens to draft, places in the run, state of the stop rule, low and high halves of the draws' addresses."""
    lines, none = [], (0, (0.0,) * (0 if rules is None else len(rules.stop.start())))
    for row, count, keys in zip(rows, counts, draw_keys(rows, steps), strict=True):
        own = row.rules
        drafted, state = none if own is None or own.rules != rules else (own.drafted, own.state)
        told = (
            *Settings.line(row.plan.sampling),
            len(row.tokens) - 1,
            row.position,
            count,
            row.place,
            drafted,
            *state,
        )
        lines.append([*told, *(keys & np.uint64(0xFFFFFFFF)).tolist(), *(keys >> np.uint64(32)).tolist()])
    return lines


def _chain_lines(rows: Sequence[DraftRow], chains: Sequence[ChainRow], steps: int) -> list[list[float]]:
    """What a ``ChainUnit`` is told of each row: settings, number of tokens before the draft, numbers that decide which
    tokens stay, low and high halves of the addresses of what follows them."""
    uniforms = (draw_keys(rows, steps, Purpose.ACCEPT) >> np.uint64(11)) * 2.0**-53
    keys = draw_keys(rows, steps + 1, Purpose.TARGET)
    halves = np.concatenate([uniforms, keys & np.uint64(0xFFFFFFFF), keys >> np.uint64(32)], 1).tolist()
    told = [(*Settings.line(chain.sampling), len(chain.feed.tokens)) for chain in chains]
    return [[*one, *rest] for one, rest in zip(told, halves, strict=True)]
