"""The passes over some of a model's rows, one operation at a time, on any runner, and what follows them.

Draft steps, levels of trees and target passes; then adjust, process, draw, signals, heads. Values that decide nothing
are not fetched: n draft steps are one host synchronisation, and rows whose logits were not finite are found at its end.
The time of a pass is divided equally among its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjust
from sprinter.decode.grow import ranked
from sprinter.decode.sequence import ReadState
from sprinter.decode.signals import SIGNALS, read_signals
from sprinter.engine.backends.base import (
    FINAL,
    After,
    Drafted,
    DraftPlan,
    DraftRow,
    RowInput,
    Scored,
    StepResult,
    TargetRow,
    TipLaws,
    TreeRow,
)  # fmt: skip
from sprinter.engine.backends.greedy import KNOWN, greedy_scores, likeliest_tokens
from sprinter.engine.backends.texts import TextRows
from sprinter.errors import SprinterError
from sprinter.heads.features import DraftStep, read_features
from sprinter.laws import Sampling, process, raw_law, wide
from sprinter.models.checks import find_fault
from sprinter.models.interface import ModelOutput
from sprinter.random import Purpose, draw_tokens

__all__ = ["EagerBackend", "alike", "feed_of", "feed_of_text", "follow", "leave_tree"]


class EagerBackend(TextRows):
    """See ``TextRows``. Any subset of the rows can be read at a time.

    Attributes:
        sync: what a question of a request costs, in draft steps; tokens are drafted ahead if it is not 0.
        decides: whether draft runs end by ``DraftRow.rules``.
    """

    sync, decides = 0.0, False

    def begin(self, feeds: Iterable[RowInput]) -> None:
        """See ``TextRows``."""
        lengths, rewound = self.runner.lengths, False
        for feed in feeds:
            row, start = feed.row, feed.start
            if lengths[row] != start:
                lengths[row], rewound = start, True
                if start < len((text := self.held.texts[row]).tokens):
                    text.cut(start)
            self._unverified.add(row)
        if rewound:
            self.runner.rewind(lengths)

    def check(self, feed: RowInput, peaks: Sequence[float]) -> SprinterError | None:
        """Check a row after a forward pass over a feed; returns an error if its logits are not finite.

        Args:
            peaks: the largest logit after each token of the feed, or after the last ones; NaN wins a maximum. Logits
                depend on all slots of the row: if they are finite, so are the slots.
        """
        if not all(map(isfinite, peaks)):
            return find_fault(peaks, self.name, feed.start + len(feed.tokens) - len(peaks))
        self._note_finite([feed.row])
        return None

    def _note_finite(self, rows: Sequence[int]) -> None:
        self._unverified.difference_update(rows)
        for row in rows:
            text = self.held.texts[row]
            text.checked = len(text.tokens)

    # --- the four verbs ---
    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        """Draft ``count`` tokens in each row, in as many steps; an error does not affect other rows."""
        found: dict[int, Drafted | SprinterError] = {}
        for group in alike(rows, self._kind):
            found |= zip(group, self._draft([rows[i] for i in group]), strict=True)
        return [found[i] for i in range(len(rows))]

    @torch.inference_mode()
    def tips(self, rows: Sequence[TreeRow]) -> list[TipLaws | SprinterError]:
        """One pass over the newest tips of trees, on a runner that reads trees."""
        began, feeds = time.perf_counter(), [row.feed for row in rows]
        logits = self._logits(self._pass(feeds, True))
        peaks = logits.amax(-1).tolist()  # the one host synchronisation
        read: list[TipLaws | SprinterError] = []
        for i, row in enumerate(rows):
            end = len(row.feed.tokens)
            fault = self.check(row.feed, peaks[i][:end])
            read.append(fault or _tip_laws(row, logits[i, end - row.count : end]))
        for one in read:
            if isinstance(one, TipLaws):
                one.draft_s = (time.perf_counter() - began) / len(rows)
        return read

    @torch.inference_mode()
    def score(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """One target pass: laws after each token of the feeds; an error does not affect other rows."""
        if self.runner.device.type == "cpu" and all(map(_is_greedy, rows)):
            return self._score_greedy(rows)
        began, counts = time.perf_counter(), [len(row.feed.tokens) for row in rows]
        law, raw, peaks, states, spent = self._target(rows, counts)
        tokens: dict[int, int] = {}
        if asked := {i: row.draw for i, row in enumerate(rows) if row.draw is not None}:
            ends = [end - 1 for end in accumulate(counts)]
            last = law if len(asked) == len(law) else law[[ends[i] for i in asked]]
            drawn = draw_tokens(last, [(*draw, 0) for draw in asked.values()], Purpose.TARGET)
            tokens = dict(zip(asked, drawn.tolist(), strict=True))
        largest, at = peaks.tolist(), 0  # the host synchronisation
        laws = torch.split(law, counts)
        raws = torch.split(raw, counts) if raw is not law else laws
        seconds = (time.perf_counter() - began) / len(rows)
        scored: list[Scored | SprinterError] = []
        for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
            fault = self.check(row.feed, largest[at : at + n])
            own = [states[layer][i, :n] for layer in row.layers] if row.layers else ()
            done = Scored(
                laws[i],
                raws[i] if row.raw else None,
                seconds,
                own,
                tokens.get(i),
                spent[i] if spent else None,
            )
            scored.append(fault or done)
            at += n
        return scored

    def _score_greedy(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """``score`` of rows that want the most probable tokens: laws are made where somebody reads them."""
        began = time.perf_counter()
        line, counts, output = self._line([row.feed for row in rows])
        logits, found = torch.split(line, counts), likeliest_tokens(line, counts)
        seconds = (time.perf_counter() - began) / len(rows)
        finite = all(isfinite(peak) for _, peaks in found for peak in peaks)
        if finite:
            self._note_finite([row.feed.row for row in rows])
        scored: list[Scored | SprinterError] = []
        for i, (row, (ids, peaks)) in enumerate(zip(rows, found, strict=True)):
            fault = None if finite else self.check(row.feed, peaks)
            one = fault or greedy_scores(row, logits[i], ids, seconds)
            if output.spent and isinstance(one, Scored):
                one.spent = output.spent[i]
            scored.append(one)
        return scored

    def _target(
        self, rows: Sequence[TargetRow], counts: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Mapping[int, Tensor], Sequence[Mapping[str, int]]]:
        """Of all tokens in one line: laws ``[n, V]``, raw laws, or the same where none are wanted, and largest logits;
        hidden states ``[rows, n, d]`` by layer; what each row asked of a server."""
        layers = sorted({layer for row in rows for layer in row.layers} - {FINAL})
        logits, _, output = self._line([row.feed for row in rows], layers)
        adjusts = [row.adjust for row in rows]
        samplings = [row.sampling for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        law = _laws(logits, counts, adjusts, samplings)
        raw = raw_law(logits) if any(row.raw for row in rows) else law
        states = {FINAL: output.hidden, **dict(zip(layers, output.layers, strict=True))}
        return law, raw, logits.amax(-1), states, output.spent

    # --- draft steps ---
    def _kind(self, row: DraftRow) -> Hashable:
        """Rows of one kind are drafted together; a head that reads the state at x has a pass of its own rows."""
        return row.plan.key if row.plan.reads_x else None

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        """``draft`` of rows of one kind."""
        began, made = time.perf_counter(), dict[Hashable, tuple[DraftPlan, list[_StepPart]]]()
        gates, afters = [0.0] * len(rows), dict[int, After]()
        live, last = list(range(len(rows))), tuple[Tensor, ...]()
        for step in range(max(row.count for row in rows)):
            stay = [at for at, i in enumerate(live) if rows[i].count > step]
            if len(stay) < len(live):
                live, last = [live[at] for at in stay], tuple(one[stay] for one in last)
            parts, last = self._step([rows[i] for i in live], step, last)
            for plan, group, result, gate_s in parts:
                members = [live[at] for at in group]
                made.setdefault(plan.key, (plan, []))[1].append((members, result))
                for i in members if gate_s else ():
                    gates[i] += gate_s / len(members)
            if len(last) > 1:
                afters |= {i: (last[1][at], last[2][at]) for at, i in enumerate(live)}
        found: dict[int, Drafted | SprinterError] = {}
        for plan, own in made.values():
            found |= self._fetch(rows, plan, own, afters)
        each_s = (time.perf_counter() - began - sum(gates)) / sum(row.count for row in rows)
        for i, row in enumerate(rows):
            if isinstance(drafted := found[i], Drafted):
                drafted.draft_s, drafted.gate_s = row.count * each_s, gates[i]
        return [found[i] for i in range(len(rows))]

    def _step(
        self, rows: Sequence[DraftRow], step: int, last: tuple[Tensor, ...]
    ) -> tuple[list[tuple[DraftPlan, list[int], StepResult, float]], tuple[Tensor, ...]]:
        """One draft step.

        Args:
            last: the tokens of the step before, ``[rows]``, and the model's output at them if it ran on them; () at
                the first step.

        Returns:
            By plan, the indices of its rows, their results and the time of its heads; and the next ``last``.
        """
        numbers = [row.row for row in rows]
        if len(last) > 1:
            _, logits, hidden = last
        elif last:
            logits, hidden = self._after(last[0], numbers)
        else:
            logits, hidden = self._after_text(rows)
        parts: list[tuple[DraftPlan, list[int], StepResult, float]] = []
        at_x: list[Tensor] = []

        def states_at_x(token: Tensor) -> Tensor:
            self.begin(RowInput(row.row, row.position + step, ()) for row in rows)
            at_x.extend(self._after(token, numbers))
            return at_x[1]

        groups = alike(rows, lambda row: row.plan.key)
        for group in groups:
            whole = len(group) == len(rows)
            own = rows if whole else [rows[i] for i in group]
            said, state = (logits, hidden) if whole else (logits[group], hidden[group])
            plan, samplings = own[0].plan, [row.plan.sampling for row in own]
            law = _laws(said, [1] * len(own), [row.adjust for row in own], samplings)
            asked = [(row.draws, row.round, row.position + step, row.draft) for row in own]
            token = draw_tokens(law, asked, Purpose.DRAFT)

            def settings(own: Sequence[DraftRow] = own) -> tuple[Tensor, Tensor]:
                each = [(float(row.place + step), row.plan.sampling.temperature) for row in own]
                places, heats = torch.tensor(each, device=logits.device).unbind(1)
                return places, heats

            result, gate_s = follow(
                plan, said, state, law, token, settings, states_at_x if plan.reads_x else None
            )
            parts.append((plan, group, result, gate_s))
        if len(groups) == 1:
            return parts, (parts[0][2].token, *at_x)
        tokens = torch.empty_like(logits[:, 0], dtype=torch.long)
        for _, group, result, _ in parts:
            tokens[group] = result.token
        return parts, (tokens,)

    def _fetch(
        self,
        rows: Sequence[DraftRow],
        plan: DraftPlan,
        steps: Sequence[_StepPart],
        afters: Mapping[int, After],
    ) -> dict[int, Drafted | SprinterError]:
        """Copy the results of some steps to the host: what each row drafted.

        Args:
            plan: of these rows. afters: outputs at the last tokens, if the model ran.
        """
        first = steps[0][0]
        ids = _joined([(members, one.token) for members, one in steps]).tolist()
        numbers = _joined([(members, one.numbers) for members, one in steps]).cpu()
        peaks = numbers[..., 0].tolist()
        ends = torch.stack([afters[i][0] for i in first]).amax(-1).tolist() if afters else []
        made: dict[int, Drafted | SprinterError] = {}
        for place, i in enumerate(first):
            row, after = rows[i], afters.get(i)
            tokens, n = ids[place][: row.count], row.count
            feed = feed_of(row, tokens if after else tokens[:-1])
            if fault := self.check(feed, [*peaks[place][:n], *ends[place : place + 1]]):
                made[i] = fault
                continue
            signals = {name: numbers[place, :n, plan.columns.index(name)] for name in row.plan.columns[1:]}
            own = [
                (one, place if len(members) == len(first) else members.index(i)) for members, one in steps[:n]
            ]
            raws = _of_row([(one.raw, at) for one, at in own]) if row.plan.raw else None
            passes = n - (not row.tokens) + (after is not None)
            laws = _of_row([(one.law, at) for one, at in own])
            made[i] = Drafted(tokens, laws, raws, signals, passes, len(feed.tokens), after, 0.0, 0.0)
        return made

    def _after_text(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, V]`` and states ``[rows, d]`` after each row's text; those of some may be known."""
        feeds = [feed_of(row) for row in rows if row.tokens]
        logits = hidden = torch.empty(0)
        if feeds:
            line, counts, output = self._line(feeds)
            ends = [end - 1 for end in accumulate(counts)]
            logits = line if len(line) == len(ends) else line[ends]
            hidden = output.hidden[range(len(counts)), [n - 1 for n in counts]]
        if len(feeds) == len(rows):
            return logits, hidden
        made = iter(zip(logits, hidden, strict=True))
        said = [next(made) if row.after is None else row.after for row in rows]
        return torch.stack([one for one, _ in said]), torch.stack([state for _, state in said])

    def _after(self, tokens: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
        """The same after one more token of each row."""
        output = self.runner.extend(tokens[:, None], rows=rows)
        return self._logits(output)[:, -1], output.hidden[:, -1]

    # --- passes ---
    def _logits(self, output: ModelOutput) -> Tensor:
        assert output.logits is not None
        return output.logits[..., : self.vocab]

    def _line(
        self, feeds: Sequence[RowInput], layers: Sequence[int] = ()
    ) -> tuple[Tensor, list[int], ModelOutput]:
        """A pass; its logits ``[tokens, V]``, of one row after the other, and the rows' numbers of tokens."""
        output, counts = self._pass(feeds, True, layers, line=True), [len(feed.tokens) for feed in feeds]
        logits = self._logits(output)
        return logits if logits.dim() == 2 else in_line(logits, counts), counts, output

    def _pass(
        self, feeds: Sequence[RowInput], logits: bool, layers: Sequence[int] = (), line: bool = False
    ) -> ModelOutput:
        """See ``TextRows``; ``line`` as of ``Runner.extend``."""
        self.begin(feeds)
        tokens, counts = self._padded(feeds)
        branching = any(feed.parents is not None for feed in feeds)
        return self.runner.extend(
            tokens, counts, logits=logits, rows=[feed.row for feed in feeds], hidden_layers=layers, line=line,
            parents=[feed.slots for feed in feeds] if branching else None,
        )  # fmt: skip

    def _padded(self, feeds: Sequence[RowInput]) -> tuple[Tensor, list[int]]:
        """The rows' tokens, padded to ``[rows, n]``, and their counts."""
        counts = [len(feed.tokens) for feed in feeds]
        n = max(counts)
        short = min(counts) < n
        padded = [[*one.tokens, *[0] * (n - len(one.tokens))] if short else one.tokens for one in feeds]
        return torch.tensor(padded, device=self.runner.device), counts


def in_line(values: Tensor, counts: Sequence[int]) -> Tensor:
    """``[rows, n, ...]`` without padding, as ``[tokens, ...]``."""
    if min(counts) == values.shape[1]:
        return values.flatten(0, 1)
    return torch.cat([own[:n] for own, n in zip(values, counts, strict=True)])


def feed_of(row: DraftRow, more: Sequence[int] = ()) -> RowInput:
    """The input of a draft row, from the length that its first step starts from; ``more``: tokens of later steps."""
    return RowInput(row.row, row.position - len(row.tokens), [*row.tokens, *more])


def leave_tree(view: ReadState, rows: EagerBackend | None) -> None:
    """Move the path of a tree that stays next to the text, before anything else is read."""
    if not view.nodes:
        return
    base, path = view.base, [view.base + node for node in view.path]
    if view.nodes_read:  # also if no node stays: the row must be a chain again
        assert rows is not None
        rows.runner.commit_path(view.row, [*range(view.root, base), *path])
        for layer, states in view.states.items():
            view.states[layer] = states[[*range(base), *path]]
    view.end_tree()


def feed_of_text(view: ReadState, text: list[int], end: int) -> RowInput:
    """The tokens up to ``end``, and the nodes behind them, that a model has not read."""
    tokens = view.unread(text, end)
    if not view.nodes:
        return RowInput(view.row, view.read, tokens)
    first, nodes = view.read + view.nodes_read, view.nodes[view.nodes_read :]
    if not view.nodes_read:
        view.begin_tree(first)
    return RowInput(view.row, first, [*tokens, *nodes], view.parents[view.nodes_read :], end)


# --- what follows a pass ---
def _is_greedy(row: TargetRow) -> bool:
    """Whether the most probable tokens are all that a row wants."""
    if row.raw or row.layers or row.adjust is not None or row.sampling.temperature != 0:
        return False
    return row.drafted > 0 if row.draw is None else type(row.draw[0]) in KNOWN


def follow(
    plan: DraftPlan,
    logits: Tensor,
    hidden: Tensor,
    law: Tensor,
    token: Tensor,
    settings: Callable[[], tuple[Tensor, Tensor]],
    at_x: Callable[[Tensor], Tensor] | None = None,
) -> tuple[StepResult, float]:
    """Signals and scores of a draft step; the seconds that the heads took.

    Args:
        logits, hidden: after each text, ``[rows, V]`` and ``[rows, d]``.
        law, token: processed laws ``[rows, V]``, and the tokens ``[rows]`` that were drawn from them.
        settings: place in the draft run and temperature of each row, float ``[rows]``, for heads.
        at_x: makes the states at the drawn tokens, for heads that read them.
    """
    raw = raw_law(logits) if plan.needs_raw else law
    columns = [logits.amax(-1)]  # NaN wins a maximum: it shows that logits are not finite
    if plan.signals:
        columns += read_signals(plan.signals, law, raw, token, hidden).values()
    gate_s = 0.0
    if plan.heads:
        states_x = None if at_x is None else at_x(token)
        began = time.perf_counter()
        place, temperature = settings()
        facts = DraftStep(hidden, raw, place, token, states_x, temperature)
        columns += [head.score(read_features(head.features, facts)) for head in plan.heads.values()]
        gate_s = time.perf_counter() - began
    values = columns[0][:, None] if len(columns) == 1 else torch.stack([wide(one) for one in columns], 1)
    return StepResult(token, law, raw, values), gate_s


def _tip_laws(row: TreeRow, logits: Tensor) -> TipLaws:
    """What a level of a tree asks for, from logits ``[tips, V]``; the growth draws."""
    if row.bare:
        return TipLaws(None, None, [], {}, 0.0, logits)
    adjusted = logits if row.adjust is None else row.adjust(logits)
    by_law = row.laws or any(SIGNALS[name].reads("law") for name in row.plan.signals)
    law = process(adjusted, row.plan.sampling) if by_law else None
    raw = raw_law(logits) if row.plan.needs_raw else None
    signals: dict[str, Tensor] = {}
    if (some := raw if law is None else law) is not None and row.plan.signals:
        made = read_signals(row.plan.signals, some, some if raw is None else raw)
        signals = {name: each.to("cpu", torch.float64) for name, each in made.items()}
    top = ranked(adjusted.float().log_softmax(-1), row.top) if row.top else []
    return TipLaws(law if row.laws else None, raw if row.plan.raw else None, top, signals, 0.0)


def _laws(
    logits: Tensor, counts: list[int], adjusts: Sequence[Adjust | None], samplings: Sequence[Sampling]
) -> Tensor:
    """Laws of ``logits [n, V]``, of which ``counts`` belong to each row: adjusted to its text, each line processed by
    its sampling; one ``process`` for all that sample alike."""
    if any(adjusts):
        each = zip(torch.split(logits, counts), adjusts, strict=True)
        logits = torch.cat([own if adjust is None else adjust(own) for own, adjust in each])
    groups = alike(samplings, lambda sampling: sampling)
    if len(groups) == 1:
        return process(logits, samplings[0])
    made = [process(logits[group], samplings[group[0]]) for group in groups]
    laws = made[0].new_empty(logits.shape)
    for group, own in zip(groups, made, strict=True):
        laws[group] = own
    return laws


_Line = TypeVar("_Line")
_StepPart = tuple[list[int], StepResult]
"""Indices of rows, and what a step made of them."""


def alike(rows: Sequence[_Line], key: Callable[[_Line], Hashable]) -> list[list[int]]:
    """The indices of rows, grouped by key."""
    first = key(rows[0])
    if all((one := key(row)) is first or one == first for row in rows[1:]):
        return [list(range(len(rows)))]
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(key(row), []).append(i)
    return list(groups.values())


def _joined(parts: Sequence[tuple[list[int], Tensor]]) -> Tensor:
    """``[rows, steps, ...]`` of what steps made of the first one's rows; zeros where a row took no part."""
    first, value = parts[0]
    if len(parts[-1][0]) == len(first):
        return torch.stack([one for _, one in parts], 1)
    made = value.new_zeros(len(first), len(parts), *value.shape[1:])
    for at, (members, one) in enumerate(parts):
        made[[first.index(i) for i in members], at] = one
    return made


def _of_row(values: Sequence[tuple[Tensor, int]]) -> Tensor:
    """A row of each step's ``[rows, V]``, as ``[n, V]``."""
    if len(values) == 1:
        return values[0][0][values[0][1] :][:1]
    return torch.stack([one[at] for one, at in values])
