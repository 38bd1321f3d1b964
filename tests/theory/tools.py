"""Random instances, exact enumeration of the real loop on chains, and the family-wise check of intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.decode.chains import paths
from torch import Tensor

from sprinter.decode.draft import AskDraft, AskScore, Draft, Record
from sprinter.decode.enumerate import ChainDriver, EnumeratedDraws
from sprinter.decode.loop import Limits, decode
from sprinter.decode.signals import prefix_signals, read_signals
from sprinter.decode.spec import Method
from sprinter.laws import overlap
from sprinter.theory.chains import MarkovChain
from sprinter.theory.montecarlo import Estimate, answer_all
from sprinter.theory.recording import Author, Recording

INSTANCES = 20
Text = tuple[int, ...]


def check_family(estimates: Sequence[Estimate], truths: Sequence[float]) -> None:
    """Each truth within its 99 % interval, at most 2 of 20 outside, none far outside.

    For intervals that hold their level, three or more of 20 miss with probability 1.0e-3, and any is more than 5.5
    standard errors off with probability 8e-7: the family-wise false-alarm rate is 0.1 %.
    """
    assert len(estimates) == len(truths) >= INSTANCES
    missed = [i for i, (one, truth) in enumerate(zip(estimates, truths, strict=True)) if not one.holds(truth)]
    assert len(missed) <= 2 * len(estimates) / INSTANCES, [(estimates[i], truths[i]) for i in missed]
    for one, truth in zip(estimates, truths, strict=True):
        error = (one.high - one.low) / 2 / 2.5758
        assert abs(one.mean - truth) <= 5.5 * error + 1e-12, (one, truth)


def laws(count: int, vocab: int, seed: int = 0, sharp: float = 1.5) -> tuple[Tensor, Tensor]:
    """p and q, ``[count, vocab]`` float64; every third pair lacks tokens in either law."""
    numbers = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(2, count, vocab, generator=numbers, dtype=torch.float64)
    gone = torch.rand(2, count, vocab, generator=numbers) < 0.3
    gone[:, torch.arange(count) % 3 > 0] = False
    gone[..., 0] = False
    p, q = torch.softmax(logits.masked_fill(gone, -torch.inf), -1)
    return p, q


def chains(count: int, states: int, horizon: int, seed: int = 0) -> list[MarkovChain]:
    """Random chains, sharper and flatter ones."""
    return [MarkovChain.random(states, horizon, seed * 1000 + i) for i in range(count)]


@dataclass(frozen=True)
class ChainPair:
    """A chain where a MarkovPair may stand; the prompt is one token."""

    chain: MarkovChain
    known_answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def vocab(self) -> int:
        return self.chain.states

    def p(self, prefix: Text) -> Tensor:
        return self.chain.p[min(len(prefix), self.chain.horizon) - 1, prefix[-1]]

    def q(self, prefix: Text) -> Tensor:
        return self.chain.q[min(len(prefix), self.chain.horizon) - 1, prefix[-1]]

    def gate(self, prefix: Text) -> float:
        return 0.5

    def score(self, head: str, prefix: Text) -> float:
        return 0.5


class ClassDriver(ChainDriver):
    """Also says whether each draft token is acceptable, q(x) <= p(x)."""

    pair: ChainPair

    def answer(self, request: AskDraft | AskScore):  # type: ignore[no-untyped-def]
        before = tuple(request.sequence.tokens)
        found = super().answer(request)
        if not isinstance(found, Draft):
            return found
        classes = []
        for i, x in enumerate(found.tokens):
            prefix = (*before, *found.tokens[:i])
            classes.append(bool(self._pair.q(prefix)[x] <= self._pair.p(prefix)[x]))
        return Draft(
            found.tokens, found.laws, {**found.signals, "acceptable": torch.tensor(classes)}, found.raw
        )


def class_paths(
    method: Method, pair: ChainPair, length: int, cells: int = 4
) -> Iterator[tuple[float, Record]]:
    """Every path of random draws through the real loop, (chance, record), for methods that ask for classes."""
    draws = EnumeratedDraws(cells)
    while True:
        record = Record()
        driver = ClassDriver(pair, draws)  # type: ignore[arg-type]
        answer_all(decode((0,), method, Limits(length), draws, record, True), driver.answer)
        yield draws.weight, record
        if not draws.next_path():
            return


def expected(method: Method, chain: MarkovChain, count: Callable[[Record], float]) -> float:
    """Exact expectation over every path of the real loop; the prompt is state 0."""
    return mean_of(paths(method, ChainPair(chain), chain.horizon), count)


def mean_of(every: Iterable[tuple[float, Record]], count: Callable[[Record], float]) -> float:
    """Expectation over all paths."""
    return math.fsum(chance * count(record) for chance, record in every)


def from_zero(chain: MarkovChain) -> MarkovChain:
    """The same chain after the prompt 0."""
    start = torch.zeros(chain.states, dtype=torch.float64)
    start[0] = 1.0
    return MarkovChain(chain.p, chain.q, start)


def record_chain(
    chain: MarkovChain, texts: int, writer: Author, seed: int = 0, gate: bool = False
) -> Recording:
    """Texts of a chain's target or draft, recorded as a probe records a pair's; the gate's score is the overlap."""
    numbers = torch.Generator().manual_seed(seed)
    own = chain.p if writer == "target" else chain.q
    before = torch.multinomial(chain.start, texts, replacement=True, generator=numbers)
    prompts, columns = before.tolist(), []
    for n in range(chain.horizon):
        x = torch.multinomial(own[n, before], 1, generator=numbers).squeeze(-1)
        columns.append((chain.p[n, before], chain.q[n, before], x))
        before = x
    p, q, tokens = (torch.stack(side, 1).flatten(0, 1) for side in zip(*columns, strict=True))
    signals = read_signals(prefix_signals(), q, q)
    if gate:
        signals["gate"] = overlap(p, q)
    return Recording(
        p, q, p, q, tokens, tokens, signals, (chain.horizon,) * texts, tuple((s,) for s in prompts), chain.horizon,
        writer,
    )  # fmt: skip
