"""Draft runs on a CPU in one call of our kernels: passes, laws and draws, without Python between steps.

Laws, draws and passes are those of ``EagerBackend``, up to rounding. What follows a step (signals, heads) decides no
token of the run, so it is computed once, over all steps.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, follow
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.laws import truncation
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws, Purpose, addresses, word_blocks

__all__ = ["SingleCallBackend", "draw_keys"]

_SMALL = 2**23  # parameters of a model whose step costs less than what Python adds to a run
_FULL = 0.7  # share of the steps of a run that rows take part in, from which on all are computed
_SYNC = 1.5  # what Python adds to a run, in steps of such a model


class SingleCallBackend(EagerBackend):
    """``EagerBackend`` over a ``RowRunner`` that drafts.

    Rows with adjusted laws, or with heads that read the state at x, draft as they do there.
    """

    def __init__(self, runner: RowRunner, vocab: int, name: str, held: HeldRows | None = None) -> None:
        super().__init__(runner, vocab, name, held)
        self._rows = runner
        if runner.straight is not None and runner.straight.size <= _SMALL:
            self.sync = _SYNC / runner.batch  # which rows share, and a dropped step costs each of them

    def _kind(self, row: DraftRow) -> Hashable:
        """Rows that draft in single steps do not change how others draft: laws would differ by rounding."""
        return super()._kind(row), self._in_one_call(row)

    def _in_one_call(self, row: DraftRow) -> bool:
        return _is_plain(row) and self._rows.drafts(row.position + row.count - 1, row.row)

    def _draft(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        if not self._in_one_call(rows[0]):
            return super()._draft(rows)
        began, steps = time.perf_counter(), max(row.count for row in rows)
        order = sorted(range(len(rows)), key=lambda i: -rows[i].count)
        own = [rows[i] for i in order]
        first, states = self._after_text(own)
        made = self._rows.draft(
            first,
            states,
            [row.row for row in own],
            [row.count for row in own],
            [row.plan.sampling.temperature for row in own],
            [truncation(row.plan.sampling) for row in own],
            draw_keys(own, steps),
            word_blocks(self.vocab),
        )
        found: dict[int, Drafted | SprinterError] = {}
        for group in alike(own, lambda row: row.plan.key):
            done = self._follow([own[at] for at in group], group, made)
            found |= {order[at]: one for at, one in zip(group, done, strict=True)}
        drafted = [one for one in found.values() if isinstance(one, Drafted)]
        gate_s = sum(one.gate_s for one in drafted)
        each_s = (time.perf_counter() - began - gate_s) / sum(row.count for row in rows)
        for one in drafted:
            one.draft_s = len(one.tokens) * each_s
        return [found[i] for i in range(len(rows))]

    def _follow(
        self, rows: Sequence[DraftRow], at: Sequence[int], made: tuple[Tensor, ...]
    ) -> list[Drafted | SprinterError]:
        """Signals and heads over all steps of some rows, those at ``at`` of a draft run; what each drafted."""
        plan: DraftPlan = rows[0].plan
        if not (plan.signals or plan.heads or plan.raw):
            return self._read_tokens(rows, at, made)
        (longest, many), drafted = made[0].shape[:2], sum(row.count for row in rows)
        whole = len(rows) == many and drafted >= _FULL * longest * many
        if whole:  # a copy of the laws costs more than the gaps
            steps = [step for step in range(longest) for _ in rows]
            every = [*rows] * longest
            parts = [slice(k, row.count * many, many) for k, row in enumerate(rows)]
            logits, hidden, law, token = (one.flatten(0, 1) for one in made)
            token = token if drafted == len(token) else token.clamp(0, self.vocab - 1)  # in gaps anything
        else:
            steps = [step for row in rows for step in range(row.count)]
            every = [row for row in rows for _ in range(row.count)]
            ends = [*accumulate(row.count for row in rows)]
            parts = [slice(end - row.count, end) for row, end in zip(rows, ends, strict=True)]
            places = [place for place, row in zip(at, rows, strict=True) for _ in range(row.count)]
            logits, hidden, law, token = (one[steps, places] for one in made)

        def settings() -> tuple[Tensor, Tensor]:
            each = zip(every, steps, strict=True)
            places = torch.tensor([float(row.place + step) for row, step in each])
            return places, torch.tensor([row.plan.sampling.temperature for row in every])

        result, gate_s = follow(plan, logits[:, : self.vocab], hidden, law, token, settings)
        tokens, peaks, numbers = token.tolist(), result.numbers[:, 0].tolist(), result.numbers
        answers = list[Drafted | SprinterError]()
        for row, own, place in zip(rows, parts, at, strict=True):
            n, drawn = row.count, tokens[own]
            feed = feed_of(row, drawn[:-1])
            signals = {name: numbers[own, column] for column, name in enumerate(plan.columns[1:], 1)}
            raws = result.raw[own] if row.plan.raw else None
            fault = self.check(feed, peaks[own])
            answers.append(
                fault
                or Drafted(
                    drawn, made[2][:n, place], raws, signals, n, len(feed.tokens), None, 0.0,
                    gate_s * n / drafted,
                )
            )  # fmt: skip
        return answers

    def _read_tokens(
        self, rows: Sequence[DraftRow], at: Sequence[int], made: tuple[Tensor, ...]
    ) -> list[Drafted | SprinterError]:
        """``_follow`` where nothing but the tokens is read."""
        logits, _, laws, tokens = made
        ids, peaks = tokens.T.tolist(), logits[..., : self.vocab].amax(-1).T.tolist()  # in gaps anything
        answers = list[Drafted | SprinterError]()
        for row, place in zip(rows, at, strict=True):
            n, drawn = row.count, ids[place][: row.count]
            feed = feed_of(row, drawn[:-1])
            fault = self.check(feed, peaks[place][:n])
            answers.append(
                fault or Drafted(drawn, laws[:n, place], None, {}, n, len(feed.tokens), None, 0.0, 0.0)
            )
        return answers


def _is_plain(row: DraftRow) -> bool:
    simple = row.adjust is None and bool(row.tokens) and not row.plan.reads_x
    return simple and isinstance(row.draws, AddressedDraws)


def draw_keys(rows: Sequence[DraftRow], steps: int, purpose: Purpose = Purpose.DRAFT) -> np.ndarray:
    """Addresses of the draws from each row's position on, ``[rows, steps]``; those beyond a row's count are of no
    draw."""
    own = purpose is Purpose.DRAFT  # what the target draws has no number of a draft
    places = np.array([row.position for row in rows]) + np.arange(steps)[:, None]
    if all(type(row.draws) is AddressedDraws for row in rows):
        rounds, drafts = np.array([(row.round, own * row.draft) for row in rows]).T
        draws: Any = [row.draws for row in rows]
        return np.ascontiguousarray(addresses(draws, rounds, places, purpose, drafts).T)
    each: Any = [(row.draws, row) for row in rows]
    return np.array([
        [draws.address(row.round, row.position + step, purpose, own * row.draft) for step in range(steps)]
        for draws, row in each
    ], np.uint64)  # fmt: skip
