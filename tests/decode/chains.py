"""Chains, oracles, rules and recorders that the tests of the loop share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule
from sprinter.decode.draft import AskDraft, AskScore, Draft, Record, Scores
from sprinter.decode.enumerate import ChainDriver, EnumeratedDraws, MarkovHeads, MarkovPair, run_chain
from sprinter.decode.loop import Limits, decode
from sprinter.decode.spec import Method
from sprinter.decode.stop import StopRule
from sprinter.decode.trust import State, TrustRule
from sprinter.random import AddressedDraws, Draws, Purpose

Text = tuple[int, ...]
Ends = Callable[[Sequence[int]], str | None]
EOS = 2


def never_ends(text: Sequence[int]) -> str | None:
    return None


def ends_at_eos(text: Sequence[int]) -> str | None:
    return "eos" if text[-1] == EOS else None


@dataclass(frozen=True)
class TablePair:
    """A pair given by functions of the prefix; replaces a MarkovPair."""

    p_of: Callable[[Text], Sequence[float]]
    q_of: Callable[[Text], Sequence[float]]
    gate_of: Callable[[Text], float] = lambda prefix: 0.0
    known_answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def p(self, prefix: Text) -> Tensor:
        return torch.tensor(self.p_of(prefix), dtype=torch.float64)

    def q(self, prefix: Text) -> Tensor:
        return torch.tensor(self.q_of(prefix), dtype=torch.float64)

    def score(self, head: str, text: Text) -> float:
        return self.gate_of(text)


def one_hot(token: int, vocab: int = 3) -> list[float]:
    return [float(i == token) for i in range(vocab)]


# --- running the loop ------------------------------------------------------------------------------------------------
class Asked(NamedTuple):
    """A request as it was when it was made: ``tokens`` from ``start`` on are new to the model that is asked."""

    start: int
    tokens: tuple[int, ...]
    round: int
    at_most: int = 0
    closing: bool = False


class Exchange(list[tuple[Asked, Any]]):
    """All requests and answers of one decoding."""

    @property
    def drafts(self) -> list[tuple[Asked, Draft]]:
        return [(ask, answer) for ask, answer in self if isinstance(answer, Draft)]

    @property
    def scores(self) -> list[Asked]:
        return [ask for ask, answer in self if isinstance(answer, Scores)]


def listen(
    method: Method,
    pair: Any,
    limits: Limits,
    draws: Draws | None = None,
    *,
    prompt: Text = (0,),
    ahead: int = 1,
    complete: bool = False,
) -> tuple[Record, Exchange]:
    """One decoding with all its messages; asserts that the text in each request agrees with the record."""
    record, exchange, draws = Record(), Exchange(), draws or AddressedDraws()
    if method.drafter.by_heads:
        method = method.settle({}, None, MarkovHeads.accuracies)
    driver = ChainDriver(pair, draws, ahead, method.accept.needs_raw, method.drafter)
    loop = decode(prompt, method, limits, draws, record, complete)
    request = next(loop, None)
    while request is not None:
        sequence, settled = request.sequence, [*prompt, *ids(record)]
        if isinstance(request, AskScore):
            asked = Asked(request.start, request.tokens, sequence.round, closing=request.closing)
            read = sequence.tokens[: request.end]
            assert settled[: len(read)] == read if request.closing else read[: len(settled)] == settled
        else:
            most = request.at_most if isinstance(request, AskDraft) else 0
            asked = Asked(len(sequence), (), sequence.round, most)
            assert sequence.tokens[: len(settled)] == settled
        answer = driver.answer(request)
        exchange.append((asked, answer))
        try:
            request = loop.send(answer)
        except StopIteration:
            request = None
    record.count()
    return record, exchange


def paths(
    method: Method,
    pair: Any,
    length: int,
    *,
    ends: Ends = never_ends,
    prompt: Text = (0,),
    ahead: int = 1,
    cells: int = 2,
    complete: bool = False,
    lossy: Callable[[Sequence[int]], bool] | None = None,
) -> Iterator[tuple[float, Record]]:
    """Every path of random draws through the real loop: (probability, record)."""
    draws, limits = EnumeratedDraws(cells), Limits(length, ends, lossy)
    while True:
        record = run_chain(method, pair, prompt, limits, draws, ahead=ahead, complete=complete)
        yield draws.weight, record
        if not draws.next_path():
            return


def law_of(every: Iterable[tuple[float, Record]]) -> dict[Text, float]:
    """The law of the texts of all paths."""
    law: defaultdict[Text, float] = defaultdict(float)
    for chance, record in every:
        law[ids(record)] += chance
    return dict(law)


def ids(record: Record) -> Text:
    return tuple(token.id for token in record.tokens)


# --- oracle ----------------------------------------------------------------------------------------------------------
def oracle(
    pair: MarkovPair,
    length: int,
    trust: Callable[[Text, int], float],
    cap: int | None,
    *,
    ends: Ends = never_ends,
    prompt: Text = (0,),
    accept: AcceptRule | None = None,
) -> tuple[dict[Text, float], float]:
    """SPRINTER by recursion over texts: the law of the texts, and the expected sum of the drifts.

    A run drafts x ~ q. x is trusted with chance ``trust(prefix, x)``, unless it is the ``cap``-th of its run and does
    not end the text; then the run goes on. Else it is checked: kept with min(1, p/q), and a bonus follows from p; or a
    replacement comes from [p - q]+. Then the next run begins. ``accept``: another rule's chances and replacement.
    """
    end = len(prompt) + length
    law: defaultdict[Text, float] = defaultdict(float)
    drift = 0.0

    def over(text: Text) -> bool:
        return len(text) == end or ends(text) is not None

    def go_on(text: Text, drafted: int, weight: float) -> None:
        if weight == 0.0:
            return
        if over(text):
            law[text[len(prompt) :]] += weight
        else:
            walk(text, drafted, weight)

    def walk(text: Text, drafted: int, weight: float) -> None:
        nonlocal drift
        p, q = pair.p(text).tolist(), pair.q(text).tolist()
        excess = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        t = [trust(text, x) if drafted + 1 != cap or over((*text, x)) else 0.0 for x in range(len(p))]
        if accept is None:
            kept = [(1 - t[x]) * min(p[x], q[x]) for x in range(len(p))]
            refused = sum((1 - t[x]) * max(0.0, q[x] - p[x]) for x in range(len(p)))
            replaced = [refused * e / sum(excess) if sum(excess) > 0 else 0.0 for e in excess]
        else:
            b, r = (f(pair.p(text), pair.q(text)).tolist() for f in (accept.keep, accept.replacement))
            kept = [(1 - t[x]) * q[x] * b[x] for x in range(len(p))]
            refused = sum((1 - t[x]) * q[x] * (1 - b[x]) for x in range(len(p)))
            replaced = [refused * chance for chance in r]
        own = [q[x] * t[x] + kept[x] + replaced[x] for x in range(len(p))]
        drift += weight * sum(abs(a - b) for a, b in zip(own, p, strict=True)) / 2
        for x in range(len(p)):
            go_on((*text, x), drafted + 1, weight * q[x] * t[x])
            go_on((*text, x), 0, weight * replaced[x])
            if over((*text, x)):
                go_on((*text, x), 0, weight * kept[x])
            elif kept[x] > 0:
                for y, bonus in enumerate(pair.p((*text, x)).tolist()):
                    go_on((*text, x, y), 0, weight * kept[x] * bonus)

    walk(prompt, 0, 1.0)
    return dict(law), drift


# --- rules -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LikelyToken(TrustRule):
    """Trusts x iff q(x) >= c: the decision depends on x."""

    c: float = 0.4
    needs: ClassVar[frozenset[str]] = frozenset({"token_prob"})
    sees_token: ClassVar[bool] = True

    def trust(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["token_prob"] >= self.c, state


@dataclass(frozen=True, slots=True)
class UnlikelyToken(StopRule):
    """Stops at x iff q(x) < c: the decision depends on x, which is kept for the target to check."""

    c: float = 0.4
    needs: ClassVar[frozenset[str]] = frozenset({"token_prob"})
    sees_token: ClassVar[bool] = True

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["token_prob"] < self.c, state


@dataclass(frozen=True, slots=True)
class Unsure(StopRule):
    """Stops where max q < c and discards the token there, on which the decision does not depend."""

    c: float = 0.55
    needs: ClassVar[frozenset[str]] = frozenset({"max_prob"})
    discards: ClassVar[bool] = True

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["max_prob"] < self.c, state


@dataclass(frozen=True, slots=True)
class Remembers(StopRule):
    """Three tokens in the first run; later one if the third of the last long run was unlikely, else three.

    The state carries what was drawn for a position into the run that drafts this position again.
    """

    c: float = 0.5
    needs: ClassVar[frozenset[str]] = frozenset({"token_prob"})
    sees_token: ClassVar[bool] = True

    def start(self) -> State:
        return (torch.tensor(False), torch.tensor(False))  # short this run, short next run

    def begin_round(self, state: State) -> State:
        return (state[1], torch.tensor(False))

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        third = signals["drafted"] >= 3
        return third | state[0], (state[0], third & (signals["token_prob"] < self.c))


@dataclass(frozen=True, slots=True)
class Grows(StopRule):
    """Two tokens more after a run that was kept whole, one less otherwise; state changes at the end of a round."""

    def start(self) -> State:
        return (torch.tensor(2),)

    def stop(self, signals: Mapping[str, Tensor], state: State) -> tuple[Tensor, State]:
        return signals["drafted"] >= state[0], state

    def end_round(self, state: State, drafted: int, checked: int, accepted: int) -> State:
        return (state[0] + 2 if accepted == checked else (state[0] - 1).clamp(min=1),)


# --- draws -----------------------------------------------------------------------------------------------------------
class RecordingDraws:
    """Counts how often each address was used."""

    def __init__(self, inner: Draws) -> None:
        self._inner = inner
        self.used: Counter[tuple[int, int, Purpose, int]] = Counter()

    @property
    def reused(self) -> dict[tuple[int, int, Purpose, int], int]:
        return {address: times for address, times in self.used.items() if times > 1}

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        self.used[round, position, purpose, row] += 1
        return self._inner.token(law, round, position, purpose, row)

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        self.used[round, position, purpose, row] += 1
        return self._inner.uniform(round, position, purpose, row)

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        self.used.update((round, position + i, Purpose.ACCEPT, row) for i in range(len(chances)))
        return self._inner.keep(chances, round, position, row)
