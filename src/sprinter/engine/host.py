"""What decoding costs beside forward passes: rules, draws and the meter, on the host, one row after the other."""

from __future__ import annotations

import time

import torch

from sprinter.decode.draft import Record, Stats
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import parse_method
from sprinter.engine.executor import Executor, RequestRun
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws

__all__ = ["host_costs"]

_PROMPT = 4  # tokens
_PLAIN, _DRAFTS, _LEARNS = "autoregressive", "speculative(gamma=3)", "optimal(step=0.05, token=0)"


def host_costs(models: Executor, tokens: int, repeats: int) -> tuple[float, float, float]:
    """Seconds outside of forward passes, as in ``PassCosts.host``; without a draft those of a round alone.

    Short texts are decoded plainly, with drafts of one length, and by a rule that learns when to stop.

    Args:
        models: one free row of ``tokens`` tokens in each, at least five. repeats: of each text; the least counts.

    Raises:
        SprinterError: a model fails.
    """

    def text(spec: str) -> tuple[float, int, int]:
        return min(_outside(models, parse_method(spec), tokens) for _ in range(repeats))

    for spec in (_PLAIN, _DRAFTS, _LEARNS) if models.draft is not None else (_PLAIN,):
        text(spec)  # warms up
    seconds, rounds, _ = text(_PLAIN)
    round, steps = seconds / rounds, [0.0, 0.0]
    for i, spec in enumerate((_DRAFTS, _LEARNS) if models.draft is not None else ()):
        seconds, rounds, drafted = text(spec)
        steps[i] = max(0.0, (seconds - rounds * round) / max(1, drafted))
    return round, steps[0], max(0.0, steps[1] - steps[0])


def _outside(models: Executor, method: Method, tokens: int) -> tuple[float, int, int]:
    """Seconds of a text outside of forward passes, its rounds and its draft tokens."""
    ids = [i % models.vocab for i in range(_PROMPT)]
    record, draws, sequence = Record(stats=Stats()), AddressedDraws(0), TokenSequence.begin(ids)
    loop = decode(sequence, method, Limits(tokens - _PROMPT), draws, record)
    run = RequestRun(models, 0, sequence, loop, method, Sampling(), draws, record, heads={}, ahead=None)
    inside, began = 0.0, time.perf_counter()
    run.begin()
    while run.input is not None:
        at = time.perf_counter()
        with torch.inference_mode():
            (done,) = models.run([run.input])
        inside += time.perf_counter() - at
        run.take(done)
    if run.error is not None:
        raise run.error
    seconds, stats = time.perf_counter() - began - inside, record.count()
    for rows in models.models:
        rows.end_text(0)
    return seconds, stats.rounds, stats.drafted
