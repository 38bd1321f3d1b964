"""What decoding costs beside forward passes: rules, draws and the meter, on the host, one row after the other."""

from __future__ import annotations

import time

import torch

from sprinter.decode.draft import Record, Stats
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import parse_method
from sprinter.engine.backends.base import DraftRow, PromptRow, TargetRow
from sprinter.engine.executor import Executor, RequestRun
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws

__all__ = ["host_costs"]

_PROMPT = 4  # tokens
_KINDS = {PromptRow: 0, DraftRow: 2, TargetRow: 3}  # in the order in which rows wait for each other
_PLAIN, _LEARNS = "autoregressive", "optimal(step=0.05, token=0)"
# The default among many rows, without copies: many draft tokens in a round, and few.
_LONG, _SHORT = (f"auto(step={step}, token=0, verify=0, signal=mean, reads=2x4x8x16)" for step in (0.02, 0.5))


def host_costs(
    models: Executor, tokens: int, repeats: int
) -> tuple[tuple[float, float, float], float, float]:
    """Seconds outside of forward passes, as in ``PassCosts.host``, ``judged`` and ``greedy``; without a draft those
    of a round alone.

    Short texts are decoded plainly, by ``auto`` with long and short drafts, and by a rule that learns when to stop.

    Args:
        models: free rows of ``tokens`` tokens, at least five. repeats: of the texts; the least counts.

    Raises:
        SprinterError: a model fails.
    """

    drawn, greedy = Sampling(), Sampling(temperature=0.0)

    def text(spec: str, sampling: Sampling = drawn) -> tuple[float, int, int]:
        return min(_outside(models, parse_method(spec), tokens, sampling) for _ in range(repeats))

    drafting = ((_LONG, drawn), (_SHORT, drawn), (_LEARNS, drawn), (_SHORT, greedy)) if models.draft else ()
    for one in ((_PLAIN, drawn), *drafting):
        text(*one)  # warms up
    seconds, rounds, _ = text(_PLAIN)
    round = seconds / rounds
    if not drafting:
        return (round, 0.0, 0.0), 0.0, 0.0

    def more(spec: str, sampling: Sampling) -> tuple[float, float]:
        """What a round takes in addition, and its draft tokens."""
        seconds, rounds, drafted = text(spec, sampling)
        return max(0.0, seconds / rounds - round), drafted / rounds

    (long, most), (short, few), (learned, many), (sure, each) = (more(*one) for one in drafting)
    step = max(0.0, (long - short) / (most - few)) if most > few else 0.0
    judged = max(0.0, short - few * step)
    return (
        (round, step, max(0.0, (learned - judged) / max(1.0, many) - step)),
        judged,
        max(0.0, sure - each * step),
    )


def _outside(models: Executor, method: Method, tokens: int, sampling: Sampling) -> tuple[float, int, int]:
    """Seconds of texts outside of forward passes, their rounds and draft tokens; one text in each row, as what one row
    needs is often still in the processor's caches for the next."""
    clock = time.thread_time  # no other thread works for the host, and what other programs do is not counted
    inside, began = 0.0, clock()
    records = [Record(stats=Stats()) for _ in range(models.models[0].runner.batch)]
    runs = [_begin(models, row, method, tokens, record, sampling) for row, record in enumerate(records)]
    while live := [run for run in runs if run.input is not None]:
        kinds = [_KINDS[type(run.input)] + (getattr(run.input, "model", "") == "target") for run in live]
        group = [run for run, kind in zip(live, kinds, strict=True) if kind == min(kinds)]
        at = clock()
        with torch.inference_mode():
            made = models.run([run.input for run in group if run.input is not None])
        inside += clock() - at
        for run, done in zip(group, made, strict=True):
            run.take(done)
    seconds = clock() - began - inside
    stats = [record.count() for record in records]
    for run in runs:
        if run.error is not None:
            raise run.error
        for rows in models.models:
            rows.end_text(run.row)
    return seconds, sum(one.rounds for one in stats), sum(one.drafted for one in stats)


def _begin(
    models: Executor, row: int, method: Method, tokens: int, record: Record, sampling: Sampling
) -> RequestRun:
    sequence = TokenSequence.begin([(row + i) % models.vocab for i in range(_PROMPT)])
    draws = AddressedDraws(row)
    loop = decode(sequence, method, Limits(tokens - _PROMPT), draws, record)
    run = RequestRun(models, row, sequence, loop, method, sampling, draws, record, heads={}, ahead=None)
    run.begin()
    return run
