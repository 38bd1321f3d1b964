"""Monte Carlo through the real decode loop: ``sprinter.decode.loop.decode`` answered by a Markov chain from tables."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import at_least, between, number
from sprinter.decode.decoding import Answer, Asking, LoopRequest
from sprinter.decode.draft import AskDraft, AskScore, AskTips, Draft, Origin, Record, Scores, Tips
from sprinter.decode.grow import ranked
from sprinter.decode.loop import Limits, decode
from sprinter.decode.sequence import depths_of
from sprinter.decode.signals import SIGNALS, given_by
from sprinter.decode.spec import Method
from sprinter.decode.trust import State, TrustRule
from sprinter.errors import UserError
from sprinter.random import Draws, Purpose
from sprinter.theory.chains import MarkovChain

__all__ = [
    "ChainRun",
    "ClassGate",
    "Estimate",
    "PlainDraws",
    "TableDriver",
    "answer_all",
    "check_drift",
    "estimate",
    "simulate",
]

Bounds = list[list[list[float]]]
OnProgress = Callable[[int, int], None]
"""(runs done, runs wanted)."""


class Estimate(NamedTuple):
    """A mean and its interval (normal approximation)."""

    mean: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether the interval covers ``value``."""
        return self.low <= value <= self.high


def estimate(values: Tensor, level: float = 0.99) -> Estimate:
    """Mean of independent values ``[runs]`` with its interval at ``level``."""
    between("level", level, 0.0, 1.0)
    at_least("runs", len(values), 2)
    values = values.double()
    z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
    mean, half = float(values.mean()), z * float(values.std()) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class ClassGate(TrustRule):
    """The gate of SPRINTER's theorems: trusts x with chance η_TP where q(x) <= p(x), else with chance η_FP.

    It needs the signal "acceptable", which no real pair can give; ``TableDriver`` does.
    """

    eta_tp: float = number(0.9, 0.0, 1.0)
    eta_fp: float = number(0.5, 0.0, 1.0)
    needs: ClassVar[frozenset[str]] = frozenset({"acceptable", "uniform"})
    sees_token: ClassVar[bool] = True

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        """u < η of x's class."""
        return signals["uniform"] < torch.where(signals["acceptable"], self.eta_tp, self.eta_fp), state


class PlainDraws:
    """Numbers from one generator, consumed in order: for simulations, where no text need be repeated piece by piece."""

    def __init__(self, seed: int) -> None:
        self._numbers = Random(seed)

    def pick(self, bounds: Sequence[float]) -> int:
        """An index with chances whose running sums are ``bounds``."""
        return min(bisect(bounds, self._numbers.random() * bounds[-1]), len(bounds) - 1)

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One token id from ``law [V]``."""
        return self.pick(list(accumulate(law.tolist())))

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1)."""
        return self._numbers.random()

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """u < chance for each."""
        return [self._numbers.random() < b for b in chances]


class TableDriver:
    """Answers the loop from a chain's tables, a whole run of drafts an answer.

    Args:
        bounds: running sums of q's rows, ``bounds[n][s]``; signals: tables ``[T, S]`` or ``[T, S, S]``.
    """

    def __init__(
        self,
        chain: MarkovChain,
        bounds: list[list[list[float]]],
        signals: Mapping[str, Tensor],
        draws: PlainDraws,
    ) -> None:
        self._chain, self._bounds, self._signals, self._draws = chain, bounds, signals, draws

    def answer(self, request: LoopRequest) -> Answer:
        """Answer one request of the loop: a ``Draft``, ``Tips`` or ``Scores``."""
        if isinstance(request, AskScore):
            return self._score(request)
        if isinstance(request, AskTips):
            return self._tips(request)
        assert isinstance(request, AskDraft)
        return self._propose(request.sequence.tokens, request.at_most)

    def _tips(self, request: AskTips) -> Tips:
        text = request.sequence.tokens
        places = [len(text) - 1 + len(path) for path in request.paths]
        laws = self._chain.q[places, list(request.nodes) or text[-1:]]
        return Tips(list(laws), ranked(laws.log(), request.top))

    def _score(self, request: AskScore) -> Scores:
        places = list(range(request.start, request.end))
        places += [request.end - 1 + depth for depth in depths_of(request.parents)]
        # the loop asks for the law beyond a draft that fills the text, too, and draws nothing from it
        within = [min(place, self._chain.horizon - 1) for place in places]
        return Scores(self._chain.p[within, list(request.tokens)])

    def _propose(self, text: Sequence[int], count: int) -> Draft:
        last, first = text[-1], len(text)
        tokens: list[int] = []
        for n in range(first - 1, first - 1 + count):
            tokens.append(self._draws.pick(self._bounds[n][tokens[-1] if tokens else last]))
        places, before = range(first - 1, first - 1 + count), [last, *tokens[:-1]]
        laws = self._chain.q[places, before]
        signals = {
            name: table[places, before, tokens] if table.dim() == 3 else table[places, before]
            for name, table in self._signals.items()
        }
        return Draft(tuple(tokens), laws, signals)


def _tables(chain: MarkovChain, needs: frozenset[str]) -> dict[str, Tensor]:
    """Those of the signals that a chain has: after each state ``[T, S]``, or of each token after it ``[T, S, S]``."""
    q, token = chain.q, torch.arange(chain.states).expand_as(chain.q)
    tables = {"acceptable": chain.q <= chain.p} if "acceptable" in needs else {}
    for name in needs & SIGNALS.keys():
        one = SIGNALS[name]
        law = q.unsqueeze(-2).expand(*q.shape, chain.states) if one.sees_token else q
        if not one.reads("state"):
            tables[name] = one(law, law, token)  # a chain's laws are raw and processed
    return tables


def check_drift(method: Method) -> None:
    """Refuse a method whose drift is not known position by position.

    Raises:
        UserError: the accept rule is a lossy rule of chains.
    """
    if method.accept.per_position is None and not method.accept.lossless:
        raise UserError(
            f"method {method.name} judges whole chains with loss, and no drift of single positions is known: "
            "give a rule of positions, or a lossless one"
        )


def answer_all(loop: Asking, answer: Callable[[LoopRequest], Answer]) -> None:
    """Answer a decoding's requests until it ends."""
    request = next(loop, None)
    while request is not None:
        try:
            request = loop.send(answer(request))
        except StopIteration:
            request = None


@dataclass(frozen=True)
class ChainRun:
    """Counts of many texts, each ``[runs]`` float64; ``tokens`` int64 ``[runs, T]``.

    Attributes:
        rejections: replacements drawn. target_calls: as in the stats. drift: sum of TV(π, p) over the text.
        first_trusted: tokens trusted in the first round, N of SPRINTER's Theorem 3.3. first_tokens: tokens that the
            first round wrote. tokens: the texts.
    """

    rejections: Tensor
    target_calls: Tensor
    drift: Tensor
    first_trusted: Tensor
    first_tokens: Tensor
    tokens: Tensor


def simulate(
    chain: MarkovChain,
    method: Method,
    runs: int,
    *,
    seed: int = 0,
    progress: OnProgress | None = None,
) -> ChainRun:
    """Decode ``runs`` texts of the chain, as long as its horizon, with the real loop.

    Args:
        progress: called after each run.

    Raises:
        UserError: the method needs a signal that a chain does not have, such as a gate's score.
    """
    at_least("runs", runs, 1)
    check_drift(method)
    length = chain.horizon
    signals = _tables(chain, method.needs)
    if missing := method.needs - signals.keys() - given_by("draws"):
        raise UserError(
            f"method {method.name} needs {', '.join(sorted(missing))}, which a Markov chain does not have"
        )
    drafter = method.drafter
    seen = method.accept.needs_raw or method.accept.needs
    if drafter.needs_target or not drafter.reads_states or drafter.greedy or seen:
        raise UserError(
            f"method {method.name} cannot be simulated on a chain: give one that samples from the draft model"
        )
    bounds = chain.q.cumsum(-1).tolist()
    prompts = list(accumulate(chain.start.tolist()))
    rows = []
    texts = torch.empty(runs, length, dtype=torch.long)
    for run in range(runs):
        draws = PlainDraws(seed * 1_000_003 + run)
        prompt, record = draws.pick(prompts), Record()
        driver = TableDriver(chain, bounds, signals, draws)
        answer_all(decode((prompt,), method, Limits(length), draws, record, complete=True), driver.answer)
        texts[run] = torch.tensor([token.id for token in record.tokens])
        rows.append(_counts(record))
        if progress is not None:
            progress(run + 1, runs)
    table = torch.tensor(rows, dtype=torch.float64).T
    rejections, calls, drift, trusted, first = table
    return ChainRun(rejections, calls, drift, trusted, first, texts)


def _counts(record: Record) -> tuple[float, ...]:
    tokens = record.tokens
    return (
        sum(token.origin is Origin.REPLACEMENT for token in tokens),
        record.stats.target_calls,
        sum(token.drift or 0.0 for token in tokens),
        sum(token.round == 1 and token.origin is Origin.TRUSTED for token in tokens),
        record.accept_lengths[0],
    )


_: type[Draws] = PlainDraws
