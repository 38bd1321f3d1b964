"""What decoding costs beside forward passes: rules, draws and the meter, on the host, one row after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from sprinter.decode.draft import Record, Stats
from sprinter.decode.draft_heads import DraftHeads
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.spec import parse_method
from sprinter.engine.driver import RowDriver
from sprinter.engine.jobs import Models
from sprinter.errors import SprinterError
from sprinter.heads.head import Head
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws

__all__ = ["HOST_TOKENS", "host_costs"]

HOST_TOKENS = 40
"""Tokens of a row that ``host_costs`` needs."""
_PROMPT = 8  # tokens
_REPEATS = 6  # the least counts: other work only adds


def host_costs(
    models: Models, method: Method, heads: Mapping[str, Head], drafting: DraftHeads | None
) -> tuple[float, float]:
    """Seconds outside of forward passes: of a round, and of each draft token in addition.

    A short text is decoded plainly and by the method, a few times.

    Args:
        models: one free row of ``HOST_TOKENS`` tokens in each. method: drafts a chain, and calls the target.
        heads, drafting: those that the method reads and drafts with.

    Raises:
        SprinterError: a model fails.
    """
    plain, own = parse_method("autoregressive"), math.inf
    round = math.inf
    for seed in range(_REPEATS):
        seconds, rounds, _ = _outside(models, plain, {}, None, seed)
        round = min(round, seconds / rounds)
    for seed in range(_REPEATS):
        seconds, rounds, drafted = _outside(models, method, heads, drafting, seed)
        own = min(own, (seconds - rounds * round) / max(1, drafted))
    return round, max(0.0, own)


def _outside(
    models: Models, method: Method, heads: Mapping[str, Head], drafting: DraftHeads | None, seed: int
) -> tuple[float, int, int]:
    """Seconds outside of forward passes, rounds, and draft tokens."""
    vocab = models.vocab
    ids, record = [i % vocab for i in range(_PROMPT)], Record(stats=Stats())
    draws = AddressedDraws(seed)
    driver = RowDriver(
        models, 0, heads, ids, method, Sampling(), draws, record.stats, ahead=None, drafting=drafting
    )
    loop = decode(ids, method, Limits(HOST_TOKENS - _PROMPT), draws, record)
    inside, began = 0.0, time.perf_counter()
    with torch.inference_mode():
        question = next(loop)
        while question is not None:
            jobs = driver.answer(question)
            try:
                job = next(jobs)
                while True:
                    at = time.perf_counter()
                    (done,) = models.run([job])
                    inside += time.perf_counter() - at
                    if isinstance(done, SprinterError):
                        raise done
                    job = jobs.send(done)
            except StopIteration as ended:
                answer = ended.value
            try:
                question = loop.send(answer)
            except StopIteration:
                break
    seconds, stats = time.perf_counter() - began - inside, record.count()
    for rows in (models.target, models.draft):
        if rows is not None:
            rows.end_text(0)
    return seconds, stats.rounds, stats.drafted
