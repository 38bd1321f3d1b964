"""One model's rows, and the passes over some of them, one operation at a time, on any runner.

What a text begins with, and what it leaves for others; prefill, draft steps, levels of trees and target passes. Values
that decide nothing are not fetched: n draft steps are one host synchronisation, and rows whose logits were not finite
are found at its end. The time of a pass is divided equally among its rows.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from sprinter.decode.sequence import ReadState, TokenSequence
from sprinter.engine.backends.base import (
    FINAL,
    Drafted,
    DraftRow,
    Epilogue,
    HostWay,
    PromptRead,
    PromptRow,
    RowInput,
    Scored,
    StepResult,
    TargetRow,
    TipLaws,
    TreeRow,
    alike,
    processed,
    target_laws,
)  # fmt: skip
from sprinter.engine.prefix import HeldRows, up_to_boundary
from sprinter.errors import SprinterError
from sprinter.models.checks import find_fault
from sprinter.models.interface import ModelOutput, Runner
from sprinter.random import Purpose, draw_tokens

__all__ = ["EagerBackend"]


class EagerBackend:
    """One model's rows, of which any subset can be read at a time.

    Args:
        runner: holds the rows.
        vocab: size of the common vocabulary; logits beyond it are dropped.
        name: "target" or "draft", for errors.
        held: what the rows hold from earlier texts; None: they are emptied, and nothing is reused.

    Attributes:
        owners: by row, of the text that is about to begin in it; "" where nobody says so.
    """

    def __init__(self, runner: Runner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        self.runner, self.vocab, self.name = runner, vocab, name
        self.held = HeldRows(runner.batch) if held is None else held
        # Rows with slots that no finite logits have verified: to discard these (maybe NaN), a mask is not enough.
        self._unverified: set[int] = set()
        self._idle = set(range(runner.batch))
        self.owners: dict[int, str] = {}
        self._every = list(range(runner.batch))
        if held is None:
            runner.rewind([0] * runner.batch)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        """Discard all but the first tokens of some rows; ``lengths``: tokens to keep, by row."""
        present = self.runner.lengths
        for row, length in lengths.items():
            self.held.texts[row].cut(length)
        wanted = [lengths.get(row, length) for row, length in enumerate(present)]
        if wanted != present:
            self.runner.rewind(wanted)

    def begin_text(self, view: ReadState, prefix: Sequence[int]) -> None:
        """Begin a text in its row: keep, or copy from another row, the longest beginning of ``prefix`` that a row holds
        of a text of the same owner. ``view.read`` is its number of tokens; the row holds no others.
        """
        row = view.row
        view.begun, view.read = True, 0
        self._idle.discard(row)
        if not self.held.on:
            return
        owner = self.owners.get(row, "")
        length, source = self.held.most_shared(prefix, row, owner)
        if length and source != row:
            self._unverified.add(row)  # if the copy is interrupted
            self.rewind({row: 0})
            self.runner.copy(source, [row], length)
            self.held.texts[row].take(self.held.texts[source], length)
            self._unverified.discard(row)
        self.rewind({row: length})
        self.held.texts[row].owner = owner
        view.read = length

    def best_row(self, free: Sequence[int], prefix: Sequence[int], owner: str = "") -> int:
        """The first of some rows that holds most of ``prefix`` and nothing else; if none holds any, an empty row, or
        else the first."""
        held = self.held
        shared = {row: held.shared(row, prefix, owner) * held.continues(row, prefix, owner) for row in free}
        if any(shared.values()):
            return max(free, key=lambda row: shared[row])
        return next((row for row in free if not held.texts[row].tokens), free[0])

    def end_text(
        self, row: int, sequence: TokenSequence | None = None, view: ReadState | None = None
    ) -> None:
        """End the text of a row: only what another text may reuse stays; nothing after a failure or an interrupt.

        Of draft tokens that the last round rejected nothing stays either: with them the row would not be taken for the
        beginning of the conversation's next prompt.
        """
        held, length = self.held.texts[row], 0
        if row not in self._unverified and self.held.on:
            if sequence is not None and view is not None and view.begun:
                chain = view.base if view.nodes else view.read  # a path of a tree has not been moved yet
                held.end(sequence.tokens[: min(chain, view.read, sequence.final)], view.chained)
            length = held.usable(self.held.cache.reuse)
        self.rewind({row: length})
        if row in self._unverified:
            self.runner.wipe(row)
            self._unverified.discard(row)
        self._idle.add(row)
        if self.runner.may_hold_nan:  # it is cleaned when all rows are empty
            self.rewind(dict.fromkeys(self._idle, 0))

    def end_all(self) -> None:
        """``end_text`` of the rows whose texts have not ended."""
        for row in set(range(self.runner.batch)) - self._idle:
            self.end_text(row)

    def begin(self, feeds: Sequence[RowInput]) -> None:
        """Rewind rows to the start of their feeds, before a forward pass over these."""
        lengths = self.runner.lengths
        if any(lengths[feed.row] != feed.start for feed in feeds):
            self.rewind({feed.row: feed.start for feed in feeds})
        self._unverified.update(feed.row for feed in feeds)

    def check(self, feed: RowInput, peaks: Sequence[float]) -> SprinterError | None:
        """Check a row after a forward pass over a feed; returns an error if its logits are not finite.

        Args:
            peaks: the largest logit after each token of the feed, or after the last ones. Logits depend on all slots of
                the row: if they are finite, so are the slots.
        """
        if not all(map(isfinite, peaks)):
            return find_fault(peaks, self.name, feed.start + len(feed.tokens) - len(peaks))
        self._unverified.discard(feed.row)
        text = self.held.texts[feed.row]
        text.checked = len(text.tokens)
        return None

    # --- the four verbs ---
    @torch.inference_mode()
    def read(self, prompts: Sequence[PromptRow]) -> list[PromptRead]:
        """Prefill without logits: passes over blocks of the texts, one per group of blocks of similar length.

        A block that several rows read after the same tokens is read once, and copied.
        """
        began = time.perf_counter()
        layers = sorted({layer for one in prompts for layer in one.layers} - {FINAL})
        wanted = any(one.layers for one in prompts)
        states: dict[int, list[Tensor]] = {}
        copied: dict[int, int] = {}
        left = [one.feed for one in prompts]
        while left:
            blocks = [_first_block(feed) for feed in left]
            twins = {} if wanted else self._twins(blocks)
            for group in _by_length([block for block in blocks if block.row not in twins]):
                output = self._pass(group, False, layers)
                for i, feed in enumerate(group):
                    made = [one[i, : len(feed.tokens)] for one in (output.hidden, *output.layers)]
                    self._note_block(feed, made[0])
                    if wanted:
                        held = states.get(feed.row)
                        states[feed.row] = (
                            made if held is None else [*map(torch.cat, zip(held, made, strict=True))]
                        )
            for block in blocks:
                if block.row in twins:
                    self._copy_block(block, twins[block.row])
                    copied[block.row] = copied.get(block.row, 0) + len(block.tokens)
            left = [_rest(feed, block) for feed, block in zip(left, blocks, strict=True) if feed != block]
        seconds, names = (time.perf_counter() - began) / len(prompts), (FINAL, *layers)
        return [
            PromptRead(
                seconds, [states[one.feed.row][names.index(layer)] for layer in one.layers],
                copied.get(one.feed.row, 0),
            )
            for one in prompts
        ]  # fmt: skip

    @torch.inference_mode()
    def draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        """Draft ``count`` tokens in each row, in as many steps; an error does not affect other rows."""
        if len(rows) == 1:
            return self._draft(rows)
        found: dict[int, Drafted | SprinterError] = {}
        for group in alike(rows, self._kind):
            found |= zip(group, self._draft([rows[i] for i in group]), strict=True)
        return [found[i] for i in range(len(rows))]

    @torch.inference_mode()
    def tips(self, rows: Sequence[TreeRow]) -> list[TipLaws | SprinterError]:
        """One pass over the newest tips of trees, on a runner that reads trees."""
        began = time.perf_counter()
        logits, faults, _ = self.forward([row.feed for row in rows])
        read: list[TipLaws | SprinterError] = []
        for i, row in enumerate(rows):
            end = len(row.feed.tokens)
            read.append(faults.get(i) or row.plan.epilogue.tips(row, logits[i, end - row.count : end]))
        for one in read:
            if isinstance(one, TipLaws):
                one.draft_s = (time.perf_counter() - began) / len(rows)
        return read

    @torch.inference_mode()
    def score(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """One target pass: laws after each token of the feeds; an error does not affect other rows."""
        began = time.perf_counter()
        layers = sorted({layer for row in rows for layer in row.layers} - {FINAL})
        feeds = [row.feed for row in rows]
        counts = [len(feed.tokens) for feed in feeds]
        output = self._pass(feeds, True, layers)
        logits = self._logits(output)
        whole = min(counts) == logits.shape[1]
        flat = (
            logits.flatten(0, 1)
            if whole
            else torch.cat([own[:n] for own, n in zip(logits, counts, strict=True)])
        )
        adjusted = flat
        if any(row.adjust for row in rows):
            each = zip(torch.split(flat, counts), rows, strict=True)
            adjusted = torch.cat([own if row.adjust is None else row.adjust(own) for own, row in each])
        samplings = [row.sampling for row, n in zip(rows, counts, strict=True) for _ in range(n)]
        made = target_laws(flat, lambda _: processed(adjusted, samplings), any(row.raw for row in rows))
        scored = self._scored(
            rows, counts, torch.split(made.law, counts), torch.split(made.raw, counts), made.peak, began
        )
        if any(row.layers for row in rows):
            states = {FINAL: output.hidden, **dict(zip(layers, output.layers, strict=True))}
            for i, (row, one) in enumerate(zip(rows, scored, strict=True)):
                if isinstance(one, Scored):
                    one.states = [states[layer][i, : counts[i]] for layer in row.layers]
        return scored

    def _scored(
        self,
        rows: Sequence[TargetRow],
        counts: Sequence[int],
        laws: Sequence[Tensor],
        raws: Sequence[Tensor],
        peaks: Tensor,
        began: float,
    ) -> list[Scored | SprinterError]:
        """Results of a target pass: laws ``[n, V]`` by row, and the largest logits of all tokens in one line."""
        tokens: dict[int, int] = {}
        if asked := [(i, row.draw) for i, row in enumerate(rows) if row.draw is not None]:
            last = [laws[i][-1:] for i, _ in asked]
            drawn = draw_tokens(torch.cat(last), [(*draw, 0) for _, draw in asked], Purpose.TARGET).tolist()
            tokens = dict(zip([i for i, _ in asked], drawn, strict=True))
        largest, at = peaks.tolist(), 0  # the host synchronisation
        seconds = (time.perf_counter() - began) / len(rows)
        scored: list[Scored | SprinterError] = []
        for i, (row, n) in enumerate(zip(rows, counts, strict=True)):
            raw = raws[i] if row.raw else None
            fault = self.check(row.feed, largest[at : at + n])
            scored.append(fault or Scored(laws[i], raw, seconds, token=tokens.get(i)))
            at += n
        return scored

    # --- draft steps ---
    def _kind(self, row: DraftRow) -> Hashable:
        """Rows of one kind are drafted together."""
        return row.plan.reads_x

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        """``draft`` of rows of one kind: as many steps as all need, then those that some need."""
        made: dict[int, Drafted | SprinterError] = {}
        left = dict(enumerate(rows))
        while left:
            # A step whose head reads the state at x ends with a pass, whose output the next one begins with.
            n = 1 if rows[0].plan.reads_x else min(row.count for row in left.values())
            for i, own in zip([*left], self._steps([*left.values()], n), strict=True):
                before = made.get(i)
                if isinstance(own, Drafted) and isinstance(before, Drafted):
                    own = before.joined(own)
                made[i] = own
                if isinstance(own, Drafted) and rows[i].count > len(own.tokens):
                    left[i] = rows[i].later(own)
                else:
                    del left[i]
        return [made[i] for i in range(len(rows))]

    def _steps(self, rows: Sequence[DraftRow], n: int) -> list[Drafted | SprinterError]:
        """Draft n tokens in each row."""
        began = time.perf_counter()
        logits, hidden = self._after_text(rows)
        groups = alike(rows, lambda row: row.plan.epilogue)
        made: list[list[StepResult]] = [[] for _ in groups]
        gates, numbers = [0.0] * len(groups), [row.row for row in rows]
        afters: dict[int, tuple[Tensor, Tensor]] = {}
        tokens = torch.empty(0)
        for step in range(n):
            if step:
                logits, hidden = self._last(self._extend(tokens[:, None], None, numbers, True), None)
            for at, group in enumerate(groups):
                whole = len(group) == len(rows)
                own = rows if whole else [rows[i] for i in group]

                def at_x(token: Tensor, own: Sequence[DraftRow] = own, at: int = at) -> Tensor:
                    self.begin([RowInput(row.row, row.position, ()) for row in own])
                    afters[at] = self._last(
                        self._extend(token[:, None], None, [row.row for row in own], True), None
                    )
                    return afters[at][1]

                one, gate_s = own[0].plan.epilogue.step(
                    logits if whole else logits[group], hidden if whole else hidden[group], HostWay(own, step),
                    at_x if own[0].plan.reads_x else None,
                )  # fmt: skip
                made[at].append(one)
                gates[at] += gate_s
            tokens = made[0][-1].token
            if len(groups) > 1:
                tokens = torch.empty(len(rows), dtype=tokens.dtype, device=tokens.device)
                for group, steps in zip(groups, made, strict=True):
                    tokens[group] = steps[-1].token
        found: dict[int, Drafted | SprinterError] = {}
        for at, group in enumerate(groups):
            own = [rows[i] for i in group]
            found |= zip(group, self._fetch(own, own[0].plan.epilogue, made[at], afters.get(at)), strict=True)
        seconds = (time.perf_counter() - began - sum(gates)) / len(rows)
        for gate_s, group in zip(gates, groups, strict=True):
            for i in group:
                if isinstance(drafted := found[i], Drafted):
                    drafted.draft_s, drafted.gate_s = seconds, gate_s / len(group)
        return [found[i] for i in range(len(rows))]

    def _fetch(
        self,
        rows: Sequence[DraftRow],
        epilogue: Epilogue,
        steps: Sequence[StepResult],
        after: tuple[Tensor, Tensor] | None,
    ) -> list[Drafted | SprinterError]:
        """Copy the results of some steps to the host.

        Args:
            epilogue: of these steps; that of a row may read less. after: outputs at the last tokens, if the model ran.
        """
        ids = torch.stack([step.token for step in steps], 1).tolist()
        numbers = torch.stack([step.numbers for step in steps], 1).cpu()
        peaks = numbers[..., 0].tolist()
        if after is not None:
            peaks = [[*own, last] for own, last in zip(peaks, after[0].amax(-1).tolist(), strict=True)]
        made: list[Drafted | SprinterError] = []
        for i, (row, tokens) in enumerate(zip(rows, ids, strict=True)):
            read = [*row.tokens, *(tokens if after else tokens[:-1])]
            if fault := self.check(row.feed._replace(tokens=read), peaks[i]):
                made.append(fault)
                continue
            signals = {
                name: numbers[i, :, epilogue.columns.index(name)] for name in row.plan.epilogue.columns[1:]
            }
            raws = _of_row([step.raw for step in steps], i) if row.plan.raw else None
            passes = len(steps) - (not row.tokens) + (after is not None)
            own = None if after is None else (after[0][i], after[1][i])
            laws = _of_row([step.law for step in steps], i)
            made.append(Drafted(tokens, laws, raws, signals, passes, len(read), own, 0.0, 0.0))
        return made

    def _after_text(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, V]`` and states ``[rows, d]`` after each row's text; those of some may be known."""
        feeds = [row.feed for row in rows if row.tokens]
        if len(feeds) == len(rows):
            return self._last(self._pass(feeds, True), feeds)
        made = iter(zip(*self._last(self._pass(feeds, True), feeds), strict=True) if feeds else ())
        said = [next(made) if row.after is None else row.after for row in rows]
        return torch.stack([one for one, _ in said]), torch.stack([state for _, state in said])

    def _last(self, output: ModelOutput, feeds: Sequence[RowInput] | None) -> tuple[Tensor, Tensor]:
        """Logits ``[rows, V]`` and states ``[rows, d]`` after the last token of each feed; None: of one token each."""
        logits, ends = self._logits(output), [] if feeds is None else [len(feed.tokens) - 1 for feed in feeds]
        if not ends or min(ends) == max(ends):
            return logits[:, -1], output.hidden[:, -1]
        return logits[range(len(ends)), ends], output.hidden[range(len(ends)), ends]

    # --- passes ---
    def forward(
        self, feeds: Sequence[RowInput], layers: Sequence[int] = ()
    ) -> tuple[Tensor, dict[int, SprinterError], ModelOutput]:
        """Run one forward pass over some rows, each at most once; other rows are unchanged.

        Args:
            layers: decoder layers whose hidden states to return.

        Returns:
            Logits ``[rows, n, V]`` in the order of the feeds, where n is the length of the longest one and values at
            padding are undefined; by index of the feed, errors in a row's logits; the whole output.
        """
        output = self._pass(feeds, True, layers)
        logits = self._logits(output)
        peaks = logits.amax(-1).tolist()  # NaN wins a maximum; the one host synchronisation
        ends = [self.check(feed, peaks[i][: len(feed.tokens)]) for i, feed in enumerate(feeds)]
        return logits, {i: fault for i, fault in enumerate(ends) if fault is not None}, output

    def _logits(self, output: ModelOutput) -> Tensor:
        assert output.logits is not None
        return output.logits[..., : self.vocab]

    def _note_block(self, feed: RowInput, hidden: Tensor) -> None:
        """Record a block of a prompt. Every token sees itself: if all states are finite, so are keys and values."""
        # llama.cpp returns no states here, and nothing but a model's own weights can give NaN there.
        text, on = self.held.texts[feed.row], self.held.on
        text.add(feed.start, feed.tokens, finite=on and bool(hidden.isfinite().all()))

    def _twins(self, blocks: Sequence[RowInput]) -> dict[int, int]:
        """Row → an earlier one that is about to read the same tokens after the same tokens."""
        if len(blocks) == 1 or not self.held.on:
            return {}
        first: dict[tuple[str | int, ...], int] = {}
        twins: dict[int, int] = {}
        for row, start, tokens, *_ in blocks:
            text = self.held.texts[row]
            if len(text.tokens) >= start:
                other = first.setdefault((text.owner, start, *text.tokens[:start], *tokens), row)
                twins |= {} if other == row else {row: other}
        return twins

    def _copy_block(self, block: RowInput, source: int) -> None:
        end = block.start + len(block.tokens)
        self.begin([block])
        self.runner.copy(source, [block.row], end)
        self.held.texts[block.row].take(self.held.texts[source], end)

    def _pass(self, feeds: Sequence[RowInput], logits: bool, layers: Sequence[int] = ()) -> ModelOutput:
        self.begin(feeds)
        more: dict[str, Any] = {"hidden_layers": layers} if layers else {}
        if any(feed.parents is not None for feed in feeds):
            more["parents"] = [feed.slots for feed in feeds]
        tokens, counts = self._padded(feeds)
        return self._extend(tokens, counts, [feed.row for feed in feeds], logits, **more)

    def _padded(self, feeds: Sequence[RowInput]) -> tuple[Tensor, list[int]]:
        """The rows' tokens, padded to ``[rows, n]``, and their counts."""
        counts = [len(feed.tokens) for feed in feeds]
        n = max(counts)
        padded = [[*feed.tokens, *[0] * (n - len(feed.tokens))] for feed in feeds]
        return torch.tensor(padded, device=self.runner.device), counts

    def _extend(
        self, tokens: Tensor, counts: Sequence[int] | None, rows: list[int], logits: bool, **more: Any
    ) -> ModelOutput:
        """``Runner.extend`` of some rows; ``counts``: None if no token ``[rows, n]`` is padding."""
        if counts is not None and min(counts) == tokens.shape[1]:
            counts = None
        given = None if rows == self._every else rows
        return self.runner.extend(tokens, counts, logits=logits, rows=given, **more)


def _of_row(values: Sequence[Tensor], i: int) -> Tensor:
    """Row i of each step's ``[rows, V]``, as ``[n, V]``."""
    return values[0][i : i + 1] if len(values) == 1 else torch.stack([one[i] for one in values])


def _first_block(feed: RowInput) -> RowInput:
    """The beginning of a feed, up to the next boundary of prefill."""
    room = up_to_boundary(feed.start)
    return feed if len(feed.tokens) <= room else feed._replace(tokens=feed.tokens[:room])


def _rest(feed: RowInput, block: RowInput) -> RowInput:
    n = len(block.tokens)
    return feed._replace(start=feed.start + n, tokens=feed.tokens[n:])


def _by_length(feeds: Sequence[RowInput]) -> list[list[RowInput]]:
    """Group feeds by length, so that padding is at most a quarter plus 8 tokens: another forward pass costs less."""
    groups: list[list[RowInput]] = []
    least = 0.0
    for feed in sorted(feeds, key=lambda feed: -len(feed.tokens)):
        if not groups or len(feed.tokens) < least:
            groups.append([])
            least = 0.75 * len(feed.tokens) - 8
        groups[-1].append(feed)
    return [sorted(group) for group in groups]
