"""What replicas of a server do under load: a simulation of the scheduler's steps, with costs of passes.

Rows, steps and waits are those of ``engine.scheduler`` under a server's policy: a step reads so many tokens of prompts,
of rows in turn, drafts in all rows that draft, and runs the target for all rows that wait for it, if enough do or one
has no text yet. All texts are one owner's. Which tokens stay is drawn with constant
chances, independently. Texts are spread over replicas at random, so that one replica stands for each of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from sprinter.engine.policy import Policy
from sprinter.engine.prompts import NEW, ChunkTurn, choose_prompts
from sprinter.errors import UserError
from sprinter.theory.machines import Costs
from sprinter.theory.settings import MOST, FleetSettings

__all__ = ["METHODS", "Forecast", "forecast", "needed"]

METHODS = ("plain", "exact", "trust")
_KEPT_UP = 0.85  # of a rate, at the last arrival: some texts are still being written then


@dataclass(frozen=True)
class Forecast:
    """What a fleet does.

    Attributes:
        first_ms, between_ms: median and 95th percentile of the time to the first token, and between events.
        token_ms: the same of a text's mean time a token after its first event; None: all texts have one event.
        text_ms: mean time of a text.
        busy: share of time in which a replica works. in_system: mean number of texts that it decodes or that wait.
        tokens_per_call, tokens_per_event: means. tokens: of all simulated texts.
    """

    method: str
    streams: int | None
    replicas: int
    rows: int
    tokens_per_s: float
    texts_per_s: float
    first_ms: tuple[float, float]
    between_ms: tuple[float, float] | None
    token_ms: tuple[float, float] | None
    text_ms: float
    busy: float
    in_system: float
    tokens_per_call: float
    tokens_per_event: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def needed(settings: FleetSettings, costs: Costs, method: str) -> Forecast | None:
    """The smallest fleet that keeps the latencies at the rate; None: none of up to 4096 replicas does."""

    def tried(replicas: int) -> Forecast | None:
        found = forecast(settings, costs, method, replicas=replicas)
        assert settings.rate is not None
        slow = found.between_ms is not None and found.between_ms[1] > settings.between_ms
        slow |= found.first_ms[1] > settings.first_ms or found.texts_per_s < _KEPT_UP * settings.rate
        return None if slow else found

    alone = forecast(replace(settings, texts=20), costs, method, 1)
    if alone.first_ms[0] > settings.first_ms or (alone.between_ms or (0.0,))[0] > settings.between_ms:
        return None
    low, high, best = 0, 1, tried(1)  # low is too few
    while best is None:
        low, high = high, 2 * high
        if high > MOST:
            return None
        best = tried(high)
    while high - low > 1:
        middle = (low + high) // 2
        if (found := tried(middle)) is None:
            low = middle
        else:
            high, best = middle, found
    return best


def forecast(
    settings: FleetSettings, costs: Costs, method: str, streams: int | None = None, replicas: int = 1
) -> Forecast:
    """Simulate one of the replicas, from an idle start until all texts have ended.

    Args:
        method: of ``METHODS``. streams: of the whole fleet; None: texts arrive at the rate.
    """
    return _Replica(settings, costs, method, streams, replicas).run()


class _Replica:
    """One replica: state of its rows, one array each, and of its texts."""

    def __init__(
        self, settings: FleetSettings, costs: Costs, method: str, streams: int | None, replicas: int
    ) -> None:
        self._set, self._costs, self._method, self._streams = settings, costs, method, streams
        self._replicas, self._numbers = replicas, np.random.default_rng(settings.seed)
        if streams is None:  # many times as many as there are at a time
            settings = replace(settings, texts=max(settings.texts, 20 * settings.rows))
        texts, self._lengths = settings.texts, _drawn(settings, self._numbers)
        self._own = (
            None if streams is None else max(1, math.ceil(streams / replicas))
        )  # streams of this replica
        self._sent, self._ended = np.zeros(texts), np.zeros(texts)
        if self._own is None:
            assert settings.rate is not None
            self._sent = np.cumsum(self._numbers.exponential(replicas / settings.rate, texts))
        self._known = texts if self._own is None else min(self._own, texts)  # texts whose time is known
        self._queue, self._next = deque[int](), 0
        rows = costs.rows(settings, float(self._lengths.sum(1).mean()))
        self._text = np.full(rows, -1)
        # of each row: tokens of the prompt that a model has not read; tokens to write; tokens that the target has not
        # read; tokens of a draft that it has to judge; trusted tokens of the run; tokens that the draft has not read;
        # whether the target is asked, and how long
        self._prompts, self._left = (
            {"target": np.zeros(rows, int), "draft": np.zeros(rows, int)},
            np.zeros(rows, int),
        )
        self._unread, self._judged, self._run, self._behind = (np.zeros(rows, int) for _ in range(4))
        self._asks, self._age, self._last = np.zeros(rows, bool), np.zeros(rows, int), np.zeros(rows)
        self._trust = settings.trust if method == "trust" else 0.0
        self._drafts = {"plain": 0, "exact": settings.gamma, "trust": 1 + settings.tail}[method]
        self._kept = settings.keep if method == "trust" else settings.accept
        self._first, self._gaps, self._counts = (
            np.full(texts, np.nan),
            list[np.ndarray](),
            np.zeros(texts, int),
        )
        self._calls = self._events = 0  # of single rows
        most = settings.step_tokens or (2048 if costs.mixed else 64)
        self._policy = Policy(first=not costs.mixed, prompt_piece=min(128, most), prompt_tokens=most)
        self._steps, self._turns = 0, np.zeros(rows, int)  # in which step a row read its prompt last

    def run(self) -> Forecast:
        """All texts."""
        now = busy = 0.0
        while self._queue or self._next < len(self._sent) or (self._text >= 0).any():
            working = bool((self._text >= 0).any())
            came, begun = self._admit(now)
            if not (self._text >= 0).any():
                now = self._sent[self._next] + self._set.text_ms / 1e3
                continue
            seconds, away, wrote = self._step()
            events = int(np.count_nonzero(wrote))
            seconds = self._set.slowdown * (seconds + self._costs.host(events, begun))
            served = self._set.step_ms + self._set.event_ms * events
            seconds += away + (served + self._set.text_ms * came * working) / 1e3
            now, busy = now + seconds, busy + seconds
            self._note(now, wrote)
        return self._summary(now, busy)

    def _admit(self, now: float) -> tuple[int, int]:
        """Take what has come, and fill free rows; returns how many have come, and how many begin."""
        before = self._next
        while self._next < self._known and self._sent[self._next] + self._set.text_ms / 1e3 <= now:
            self._queue.append(self._next)
            self._next += 1
        free = np.flatnonzero(self._text < 0)[: len(self._queue)]
        for row in free:
            self._text[row] = text = self._queue.popleft()
            prompt, self._left[row] = self._lengths[text]
            self._prompts["target"][row], self._prompts["draft"][row] = (
                prompt - 1,
                (prompt - 1) * (self._drafts > 0),
            )
            self._unread[row], self._judged[row], self._run[row], self._age[row] = 1, 0, 0, 0
            self._asks[row], self._behind[row], self._turns[row] = not self._drafts, 1, self._steps - NEW
        return self._next - before, len(free)

    def _step(self) -> tuple[float, float, np.ndarray]:
        """One step of the scheduler: its seconds here, those of round trips, and the tokens that each row wrote."""
        live, wrote, seconds, away = self._text >= 0, np.zeros(len(self._text), int), 0.0, 0.0
        self._steps += 1
        mixed = self._costs.mixed
        prompts = int(self._read("target", live & self._asks).sum()) if mixed else 0
        if (read := self._read("draft", live & ~self._asks)).any():
            seconds += self._costs.prompts("draft", read)
        drafting = live & ~self._asks & (self._prompts["draft"] == 0)
        if drafting.any():
            seconds += self._draft(drafting, wrote)
        if not mixed and (read := self._read("target", live & self._asks)).any():
            seconds += self._costs.prompts("target", read)
            away += self._set.round_trip_ms / 1e3
        waiting = live & self._asks & (self._prompts["target"] == 0) & (self._left > wrote)
        reading = np.where(self._asks, self._prompts["target"], self._prompts["draft"]) > 0
        under_way = live & (self._left > wrote) & (mixed | ~reading)
        called = waiting.any() and self._policy.calls(
            int(waiting.sum()), int(under_way.sum()), int(self._age[waiting].max()),
            bool((self._counts[self._text[waiting]] == 0).any()),
        )  # fmt: skip
        self._age[waiting] += 1
        if called or prompts:
            rows = waiting & bool(called)
            tokens = (self._unread + self._judged)[rows]
            held = int((self._lengths[self._text, 0] + self._counts[self._text])[rows].sum())
            seconds += self._costs.target(tokens, prompts, held)
            away += self._set.round_trip_ms / 1e3
            self._judge(rows, wrote)
        return seconds, away, wrote

    def _read(self, model: str, asking: np.ndarray) -> np.ndarray:
        """Read what a step reads of the prompts of rows that ask; returns the tokens of each."""
        left, most = self._prompts[model], self._policy.prompt_tokens or 0
        taken = np.where(asking, left, 0)
        if self._costs.mixed:
            before = np.cumsum(taken) - taken
            taken = np.clip(most - before, 0, taken)
        elif taken.any():
            taken = np.minimum(taken, self._policy.prompt_piece)
            rows = [ChunkTurn(i, "", self._turns[i], taken[i], i) for i in np.flatnonzero(taken).tolist()]
            chosen = choose_prompts(rows, {"": 0}, most)
            taken[np.setdiff1d(np.arange(len(taken)), chosen)] = 0
            self._turns[chosen] = self._steps
        left -= taken
        return taken

    def _draft(self, rows: np.ndarray, wrote: np.ndarray) -> float:
        """Draft: the whole run where its length is known, else one token."""
        wanted = np.where(rows, np.minimum(self._drafts, self._left) - self._judged, 0)
        if self._trust:
            wanted = np.minimum(wanted, 1)
        behind = int(self._behind[rows].max())
        seconds = sum(self._costs.draft(int((wanted > i).sum()), behind) for i in range(int(wanted.max())))
        self._behind[rows] = 1
        trusted = rows & (self._judged == 0) & (self._numbers.random(len(rows)) < self._trust)
        trusted &= (self._run < self._set.cap - 1) | (self._left == 1)  # the last one of a run is checked
        wrote[trusted] += 1
        self._unread[trusted] += 1
        self._run[trusted] += 1
        self._judged[rows & ~trusted] += wanted[rows & ~trusted]
        self._asks[rows] = (~trusted & (self._judged >= np.minimum(self._drafts, self._left)))[rows]
        return seconds

    def _judge(self, rows: np.ndarray, wrote: np.ndarray) -> None:
        """The target's pass for these rows: tokens stay up to the first refusal, and one more is written."""
        drawn = self._numbers.random((len(rows), max(1, self._drafts))) < self._kept
        drawn &= np.arange(drawn.shape[1]) < self._judged[:, None]
        stay = np.cumprod(drawn, 1).sum(1)
        wrote[rows] = np.minimum(stay + 1, self._left)[rows]
        self._behind[rows] = (
            1 + ((stay == self._judged) & (self._judged > 0))[rows]
        )  # the last draft token is unread
        self._calls += int(rows.sum())
        self._unread[rows], self._judged[rows], self._run[rows], self._age[rows] = 1, 0, 0, 0
        self._asks[rows] = not self._drafts

    def _note(self, now: float, wrote: np.ndarray) -> None:
        """Book what was written at a time; texts that have ended leave their rows, and their clients ask again."""
        who = np.flatnonzero(wrote)
        texts, new = self._text[who], self._counts[self._text[who]] == 0
        self._first[texts[new]] = now - self._sent[texts[new]]
        self._gaps.append(now - self._last[who[~new]])
        self._events += len(who)
        self._last[who] = now
        self._counts[texts] += wrote[who]
        self._left[who] -= wrote[who]
        over = who[self._left[who] == 0]
        self._ended[self._text[over]] = now
        self._text[over] = -1
        if self._own is not None:
            asked = min(len(over), len(self._sent) - self._known)
            self._sent[self._known : self._known + asked] = now
            self._known += asked

    def _summary(self, now: float, busy: float) -> Forecast:
        counts, took = self._counts, self._ended - self._sent
        written, begun = int(counts.sum()), self._ended - self._sent - self._first
        several = counts > 1
        share, ended, until = float(self._replicas), len(counts), now
        if self._own is not None:
            share = (self._streams or 0) / self._own
        else:  # the last texts have the replica for themselves
            until = self._sent[-1]
            ended = int((self._ended <= until).sum())
        texts_per_s = float(share * ended / until)
        return Forecast(
            self._method, self._streams, self._replicas, len(self._text), texts_per_s * written / len(counts),
            texts_per_s, _spread(self._first) or (0.0, 0.0), _spread(np.concatenate(self._gaps)),
            _spread(begun[several] / (counts[several] - 1)), 1e3 * float(took.mean()), busy / now,
            float(took.sum()) / now, written / max(1, self._calls), written / self._events, written,
        )  # fmt: skip


def _spread(seconds: np.ndarray) -> tuple[float, float] | None:
    """Median and 95th percentile in milliseconds; None of nothing."""
    if not len(seconds):
        return None
    low, high = np.percentile(1e3 * seconds, [50, 95])
    return float(low), float(high)


def _drawn(settings: FleetSettings, numbers: np.random.Generator) -> np.ndarray:
    """Lengths of prompts and answers ``[texts, 2]``: of the file, in its order, again and again; or drawn."""
    if settings.lengths is not None:
        try:
            found = np.loadtxt(settings.lengths, dtype=int, ndmin=2)
        except (OSError, ValueError) as error:
            raise UserError(f"lengths '{settings.lengths}' cannot be read ({error})") from None
        if found.size == 0 or found.shape[1] != 2 or found.min() < 1:
            raise UserError(
                f"lengths '{settings.lengths}': give two whole numbers >= 1 a line, prompt and answer"
            )
        return np.resize(found, (settings.texts, 2))
    means = np.array([settings.prompt_tokens, settings.answer_tokens])
    if not settings.spread:
        return np.tile(means.round().astype(int), (settings.texts, 1))
    shape = settings.spread**-2
    return np.maximum(1, numbers.gamma(shape, means / shape, (settings.texts, 2)).round()).astype(int)
