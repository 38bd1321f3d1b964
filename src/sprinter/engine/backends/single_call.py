"""Draft runs on a CPU in one call of our kernels: passes, laws and draws, without Python between steps.

Laws, draws and passes are those of ``EagerBackend``, up to rounding. What follows a step (signals, heads) decides no
token of the run, so it is computed once, over all steps.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from sprinter.engine.backends.base import Drafted, DraftPlan, DraftRow
from sprinter.engine.backends.eager import EagerBackend, alike, feed_of, follow
from sprinter.engine.prefix import HeldRows
from sprinter.errors import SprinterError
from sprinter.models.runners.row import RowRunner
from sprinter.random import AddressedDraws, Purpose, word_blocks

__all__ = ["SingleCallBackend"]

_SMALL = 2**23  # parameters of a model whose step costs less than what Python adds to a run
_SYNC = 1.5  # what Python adds to a run, in steps of such a model


class SingleCallBackend(EagerBackend):
    """``EagerBackend`` over a ``RowRunner`` that drafts.

    Rows with adjusted or truncated laws, or with heads that read the state at x, draft as they do there.
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

    def _draft(self, rows: Sequence[DraftRow], unit: Any = None) -> list[Drafted | SprinterError]:
        if not self._in_one_call(rows[0]):
            return super()._draft(rows, unit)
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
            [_keys(row, steps) for row in own],
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
        steps = [step for row in rows for step in range(row.count)]
        places = [place for place, row in zip(at, rows, strict=True) for _ in range(row.count)]
        logits, hidden, law, token = (one[:, 0] if one.shape[1] == 1 else one[steps, places] for one in made)
        each = [
            (float(row.place + step), row.plan.sampling.temperature)
            for row in rows
            for step in range(row.count)
        ]
        result, gate_s = follow(plan, logits[:, : self.vocab], hidden, law, token, lambda: _columns(each))
        tokens, peaks, begin = token.tolist(), result.numbers[:, 0].tolist(), 0
        numbers, answers = result.numbers, list[Drafted | SprinterError]()
        for row in rows:
            own = slice(begin, begin := begin + row.count)
            feed = feed_of(row, tokens[own][:-1])
            signals = {name: numbers[own, plan.columns.index(name)] for name in row.plan.columns[1:]}
            raws = result.raw[own] if row.plan.raw else None
            spent = gate_s * row.count / len(steps)
            fault = self.check(feed, peaks[own])
            answers.append(
                fault
                or Drafted(
                    tokens[own], law[own], raws, signals, row.count, len(feed.tokens), None, 0.0, spent
                )
            )
        return answers


def _is_plain(row: DraftRow) -> bool:
    sampling = row.plan.sampling
    whole = sampling.top_k == 0 and sampling.top_p == 1.0 and sampling.min_p == 0.0
    simple = row.adjust is None and bool(row.tokens) and not row.plan.reads_x
    return whole and simple and isinstance(row.draws, AddressedDraws)


def _keys(row: DraftRow, steps: int) -> list[int]:
    assert isinstance(row.draws, AddressedDraws)
    ends = row.position + row.count - 1  # places beyond the row's own are not drawn
    places = (min(row.position + step, ends) for step in range(steps))
    return [row.draws.address(row.round, place, Purpose.DRAFT, row.draft) for place in places]


def _columns(each: Sequence[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    places, heats = torch.tensor(each).unbind(1)
    return places, heats
