"""What an engine's steps take under load, measured where it is spent: in an engine that writes texts of random tokens.

A pass takes longer there than in a loop of its own: between two passes of a model the other one's weights, the rules
and the events go through the processor's caches.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from statistics import median
from typing import Any

import numpy as np

from sprinter.decode.checks import at_least
from sprinter.engine.backends.base import DraftRow, PromptRow
from sprinter.engine.engine import Engine
from sprinter.engine.pair import Pair
from sprinter.errors import UserError

__all__ = ["LoadCosts", "fit", "known", "measure_load", "weights"]

_TOKENS, _UNREAD, _SHORT = (1, 5), (1, 2), (1, 16)
_NEW, _DRAFTS = 24, 4
_PLAIN, _EXACT, _GATED, _NO_GATE = "autoregressive", f"speculative(gamma={_DRAFTS})", "sprinter", "svip"
CostTable = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """Seconds of passes and of what follows them on the host, at ``rows`` that share a pass (first index).

    Attributes:
        rows: ascending from 1. prompt_tokens: of each row in passes over prompts, in the same way.
        target: of target passes over 1 and 5 tokens of each row, in texts with drafts of fixed length or none.
        checks: the same in texts with a gate, which have trusted tokens to score.
        prompts, draft_prompts: of the target's and the draft's passes over ``prompt_tokens``.
        draft: a token, of drafts of 4 whose first step reads 1 or 2 tokens.
        gated: of a draft step by itself, with the gate if the pair has one, by the tokens that it reads.
        host: of a step of the engine beside its passes, of an event, of a text's beginning and end.

    Raises:
        UserError: these are no such tables.
    """

    rows: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    target: CostTable
    checks: CostTable
    prompts: CostTable
    draft_prompts: CostTable
    draft: CostTable
    gated: CostTable
    host: tuple[float, ...]

    def __post_init__(self) -> None:
        rows = len(self.rows)
        shapes = dict.fromkeys(("target", "checks", "draft", "gated"), (rows, 2)) | {"host": (3,)}
        shapes |= dict.fromkeys(("prompts", "draft_prompts"), (rows, len(self.prompt_tokens)))
        for name, shape in shapes.items():
            value = np.array(getattr(self, name), dtype=float)
            if value.shape != shape or not (np.isfinite(value) & (value >= 0)).all():
                raise UserError(f"costs: {name} is no table {shape} of seconds: give measured ones")
        for at in (self.rows, self.prompt_tokens):
            if list(at)[:1] != [1] or len(at) < 2 or list(at) != sorted(set(at)) or not np.isfinite(at).all():
                raise UserError(
                    "costs: rows and prompt_tokens are two or more numbers, ascending from 1: give measured ones"
                )

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> LoadCosts:
        """Costs from the JSON values of their fields.

        Raises:
            UserError: they are others.
        """
        try:
            return cls(**{name: _tuples(value) for name, value in kept.items()})
        except UserError:
            raise
        except (TypeError, ValueError) as error:
            raise UserError(f"costs: {error}: give what was measured") from None

    @classmethod
    def mean(cls, several: Sequence[LoadCosts]) -> LoadCosts:
        """Costs that were measured several times, at the same rows."""
        names = [one.name for one in fields(cls)]
        found = {name: np.mean([np.array(getattr(one, name)) for one in several], 0) for name in names}
        return cls.from_json({name: value.tolist() for name, value in found.items()})

    def seconds(self, table: str, rows: int, tokens: int) -> float:
        """A pass of ``rows`` rows, the longest of which has so many tokens; between measured ones, and beyond, on
        lines; no pass beyond takes less than the last measured one."""
        columns = (
            self.prompt_tokens if "prompts" in table else _UNREAD if table in ("draft", "gated") else _TOKENS
        )
        measured = np.array(getattr(self, table))
        last = min(rows, self.rows[-1]), min(tokens, columns[-1])
        return max(
            float(weights(self.rows, n) @ measured @ weights(columns, t)) for n, t in ((rows, tokens), last)
        )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def weights(at: Sequence[int], x: float) -> np.ndarray:
    """Weights of the values at ascending points, for the value at x on the line through the two next to it."""
    right = min(len(at) - 1, max(1, bisect_right(at, x)))
    found = np.zeros(len(at))
    found[right] = (x - at[right - 1]) / (at[right] - at[right - 1])
    found[right - 1] = 1 - found[right]
    return found


def fit(facts: Sequence[Sequence[float]], values: Sequence[float]) -> np.ndarray:
    """The coefficients, none below zero, with which the facts add up to the values, in least squares."""
    features, found = np.array(facts, float), np.zeros(len(facts[0]))
    used = np.arange(len(found))
    while len(used):
        found[:] = 0.0
        found[used] = np.linalg.lstsq(features[:, used], np.array(values, float), rcond=None)[0]
        if (found >= 0).all():
            break
        used = used[used != found.argmin()]
        found[:] = 0.0
    return found


def known(table: np.ndarray | Sequence[Sequence[float]]) -> np.ndarray:
    """A table in which what was not seen, 0, is as large as what was of fewer rows or tokens, or else the least."""
    found = np.array(table, float)
    smaller = np.maximum.accumulate(np.maximum.accumulate(found, 0), 1)
    found = np.where(found > 0, found, smaller)
    return np.where(found > 0, found, found[found > 0].min(initial=np.inf))


def measure_load(pair: Pair, rows: int = 16, *, prompt: int = 64, seconds: float = 10.0) -> LoadCosts:
    """Write texts in an engine, 1, 4, ... ``rows`` at a time, plainly, with drafts of 4, and token by token.

    Args:
        prompt: tokens of the prompts, 17 or more. seconds: for which it goes on; once at least.

    Raises:
        UserError: the pair has no draft, or the prompts are too short. SprinterError: a model fails.
    """
    at_least("prompt", prompt, _SHORT[-1] + 1)
    if pair.models.draft is None:
        raise UserError("costs of rounds are those of two models, and this pair has no draft: give draft=...")
    counts = (1, *(n for n in (4, 16, 64) if n < rows), max(2, rows))
    single = _NO_GATE if pair.gate is None else _GATED
    texts = [(method, prompt) for method in (_PLAIN, _EXACT, single)] + [(_EXACT, short) for short in _SHORT]
    seen, steps, began = _Seen(list), list[tuple[float, ...]](), time.perf_counter()
    for turn in count(-1):  # the first one, of one row, warms up
        for n in counts[:1] if turn < 0 else counts:
            for method, read in texts:
                with _Timed(pair, counts[-1], max_len=prompt + _NEW + 1) as engine:
                    engine._models.judges = False  # each model's passes are timed apart
                    engine.seen, engine.gated, engine.all = seen, method == single, read == prompt
                    made = engine.write(method, n, read, random.Random(f"{turn} {n} {method} {read}"))
                    steps += made if engine.all else []
        if turn < 0:
            seen, steps, began = _Seen(list), [], time.perf_counter()
        elif time.perf_counter() - began > seconds:
            break

    def table(name: str, columns: Sequence[int]) -> CostTable:
        """The values at ``counts`` and ``columns`` between which what was measured lies."""
        kept = _undisturbed(seen[name])
        facts = [np.outer(weights(counts, n), weights(columns, x)).ravel().tolist() for n, x, _ in kept]
        made = fit(facts, [one[-1] for one in kept]).reshape(len(counts), -1)
        found: CostTable = _tuples(known(made).tolist())
        return found

    lengths = (*_SHORT, prompt)
    return LoadCosts(
        counts, lengths, table("target", _TOKENS), table("checks", _TOKENS), table("prompts", lengths),
        table("draft_prompts", lengths), table("draft", _UNREAD), table("gated", _UNREAD),
        tuple(fit([one[:-1] for one in steps], [one[-1] for one in steps]).tolist()),
    )  # fmt: skip


_Seen = defaultdict[str, list[tuple[int, int, float]]]
"""By table: rows, tokens, seconds."""


def _undisturbed(seen: Sequence[tuple[int, int, float]]) -> list[tuple[int, int, float]]:
    """All but those that took three times the median of their kind: something else had the processor."""
    kinds = defaultdict[tuple[int, int], list[float]](list)
    for rows, tokens, seconds in seen:
        kinds[rows, tokens].append(seconds)
    usual = {kind: median(each) for kind, each in kinds.items()}
    return [one for one in seen if one[2] < 3 * usual[one[:2]]]


class _Timed(Engine):
    """An engine that times its passes, each with what follows it on the host."""

    seen: _Seen
    gated: bool
    all: bool  # whether other passes than those over prompts count
    inside: float

    def _do(self, group: Sequence[Any]) -> None:
        given = [one.run.input for one in group]
        began = time.perf_counter()
        super()._do(group)
        seconds, first = time.perf_counter() - began, given[0]
        if first is None:  # texts that begin
            return
        self.inside += seconds
        if not (self.all or isinstance(first, PromptRow)):
            return
        if isinstance(first, DraftRow):
            steps = max(one.count for one in given)
            if self.gated or steps == _DRAFTS:
                unread = max(len(one.tokens) for one in given)
                self.seen["gated" if self.gated else "draft"].append(
                    (len(given), max(1, unread), seconds / steps)
                )
            return
        tokens = max(len(one.feed.tokens) for one in given)
        name = "checks" if self.gated else "target"
        if isinstance(first, PromptRow):
            name = "prompts" if first.model == "target" else "draft_prompts"
        self.seen[name].append((len(given), tokens, seconds))

    def write(
        self, method: str, at_once: int, prompt: int, numbers: random.Random
    ) -> list[tuple[float, ...]]:
        """Write half as many texts again as at once; of each step: 1, its events, texts that begin or end (a half
        each), and its seconds beside passes."""
        found, left = list[tuple[float, ...]](), at_once + (at_once + 1) // 2
        begun, vocab = 0, self._runtime.models.vocab_size
        while left or self.unfinished:
            while left and self.unfinished < at_once:
                ids = [numbers.randrange(vocab) for _ in range(prompt + 1)]
                self.add(ids, method=method, max_new_tokens=_NEW if self.all else 3, seed=left)
                left, begun = left - 1, begun + 1
            self.inside, began = 0.0, time.perf_counter()
            events = self.step()
            seconds = time.perf_counter() - began - self.inside
            ended = sum(event.generation is not None for event in events)
            found.append((1.0, len(events), (begun + ended) / 2, seconds))
            begun = 0
        return found
