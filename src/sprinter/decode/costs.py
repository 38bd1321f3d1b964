"""What forward passes cost on a machine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import linear_regression, mean
from typing import Any

from sprinter.errors import UserError

__all__ = ["EACH", "ENTROPY", "MEAN", "MEASURED", "READS", "STEP", "PassCosts", "best_length"]

MEASURED = "measured"
"""Value of a parameter: a cost that is measured on this machine."""
ENTROPY, MEAN = "entropy", "mean"
"""Values of ``PassCosts.signal``."""
READS = (2, 4, 8, 16)
"""Tokens of the target passes whose costs ``PassCosts.reads`` names."""
EACH = 3
"""Tokens of each row in the passes of ``PassCosts.several``."""
STEP = 0.25
"""Cost of a draft step in units of a target pass over one token, where none was measured."""

_Points = tuple[tuple[float, float], ...]
_ROUND = 8  # draft tokens of the longest pass that ``verify`` and ``token`` describe
_GOOD = 0.8  # of draft tokens that the target keeps, where a draft is good
_LEARNS = 0.015  # of a target pass: what a rule that learns may cost for a draft token, and still gain by it
_LONGEST_RUN = 12  # draft tokens of a round in ``best_run``
_KEPT = 256  # results of methods that every text asks for


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Seconds of forward passes on this machine.

    Attributes:
        target: (mean tokens of a pass, its seconds), at least two, tokens ascending from 1.
        draft: the same of a draft step, which reads so many tokens; (): drafting costs nothing, as in lookup.
        shared: (rows, seconds of a target pass over one token of each, seconds of a draft step of all), rows ascending
            from 2; (): as for so many tokens of one row.
        several: (rows, seconds of a target pass over ``EACH`` tokens of each), for the same rows; (): such a pass costs
            beside one over one token of each what it does in one row. Attention over many rows costs more.
        host: seconds outside of forward passes (rules, draws): of a round, of each step of the draft in addition, and
            of each step once more where a rule learns from verdicts.
        judged: the same of a round that drafts, in addition, however much it drafts. greedy: the same without draws.
        start: seconds of a draft run in addition to its steps, once for all rows: the target's pass before it has left
            little of the draft in the processor's caches.
        signal: what a rule should learn from: "entropy", or "mean" where learning costs more than it gains.
    """

    target: _Points
    draft: _Points = ()
    shared: tuple[tuple[int, float, float], ...] = ()
    several: tuple[tuple[int, float], ...] = ()
    host: tuple[float, float, float] = (0.0, 0.0, 0.0)
    signal: str = ENTROPY
    judged: float = 0.0
    greedy: float = 0.0
    start: float = 0.0

    def __post_init__(self) -> None:
        for name in ("target", "draft", "shared", "several"):  # lists have no hash
            object.__setattr__(self, name, tuple(map(tuple, getattr(self, name))))
        for name, points in (("target", self.target), ("draft", self.draft)):
            counts = [tokens for tokens, _ in points]
            if counts[:1] != [1][: len(counts)] or len(counts) == 1 or (name == "target" and not counts):
                raise UserError(f"costs of the {name} are {points}: give two or more, the first of one token")
            if any(a >= b for a, b in pairwise(counts)) or any(not seconds > 0 for _, seconds in points):
                raise UserError(
                    f"costs of the {name} are {points}: give ascending tokens and positive seconds"
                )
        rows = [one[0] for one in self.shared if len(one) == 3]
        cheap = any(len(one) != 3 or not one[1] > 0 or not one[2] >= 0 for one in self.shared)
        cheap |= len(self.host) != 3 or any(
            not one >= 0 for one in (*self.host, self.judged, self.greedy, self.start)
        )
        cheap |= bool(self.several) and [one[0] for one in self.several if one[1] > 0] != rows
        if cheap or any(a >= b for a, b in pairwise([1, *rows])):
            raise UserError(
                f"shared={self.shared}, several={self.several}, host={self.host}: give ascending rows from 2, the same "
                "in both, and seconds that are not negative"
            )

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> PassCosts:
        """Costs from the JSON values of their fields; raises a KeyError, TypeError or ValueError for others."""
        points: dict[str, Any] = {
            name: tuple(map(tuple, kept[name])) for name in ("target", "draft", "shared", "several")
        }
        judged = kept.get("judged", 0.0)
        more = {"greedy": kept.get("greedy", judged), "start": kept.get("start", 0.0)}
        return cls(**points, host=tuple(kept["host"]), judged=judged, **more)

    @lru_cache(maxsize=_KEPT)  # noqa: B019
    def of_rules(self, learns: bool, rows: int | None = None, greedy: bool = False) -> PassCosts:
        """The costs of a method with, or without, a rule that learns; with ``rows``, of one that learns if that pays in
        passes of so many rows; ``greedy``: of texts without draws."""
        round, step, learned = self.host
        signal = ENTROPY
        if rows is not None and learned * rows > _LEARNS * self.for_rows(rows).target_s(1):
            learns, signal = False, MEAN
        judged = self.greedy if greedy else self.judged
        return replace(self, host=(round, step + learned * learns, 0.0), signal=signal, judged=judged)

    @lru_cache(maxsize=_KEPT)  # noqa: B019
    def for_rows(self, rows: int) -> PassCosts:
        """Costs of passes that so many rows share, as each of them sees it: so many tokens of every row at a time.

        What the host does for the rows, one after the other, is part of them.
        """
        first, more, _ = self.host

        def seconds(points: _Points, column: int, host: float, judged: float = 0.0) -> _Points:
            if not points:
                return ()
            alone = points[0][1]
            among = ((1, alone), *((one[0], one[column]) for one in self.shared))
            extra = _along(among, rows) - _along(points, rows) if self.shared and rows > 1 else 0.0
            tokens, more = {1.0, *(n / rows for n, _ in points if n > rows)}, 0.0
            if self.several and column == 1 and rows > 1:
                longer = ((1, _along(points, EACH)), *self.several)
                more = (_along(longer, rows) - _along(points, EACH * rows) - extra) / (EACH - 1)
                tokens |= {float(EACH)}
            tokens |= {2.0} if len(tokens) == 1 or judged else set()
            made, least = list[tuple[float, float]](), alone  # more tokens cost no less
            for n in sorted(tokens):
                least = max(_along(points, n * rows) + extra + more * (n - 1), least)
                made.append((n, least + (host + judged * (n > 1)) * rows))
            return tuple(made)

        target = seconds(self.target, 1, first, self.judged)
        start = self.start if self.draft else 0.0
        return PassCosts(target, seconds(self.draft, 2, more), signal=self.signal, start=start)

    def target_s(self, tokens: float) -> float:
        """Seconds of a target pass over a (mean) number of tokens >= 1."""
        return _along(self.target, tokens)

    @property
    def step(self) -> float:
        """Cost of a draft step in units of a target pass over one token."""
        return self.draft_s(1) / self.target_s(1)

    @property
    def token(self) -> float:
        """Further cost of each token that the target reads in a pass, in the same unit."""
        return self._line[1]

    @property
    def verify(self) -> float:
        """Further cost of a pass over more than one token, in the same unit: other kernels may run it, and a draft run
        was started for it."""
        return self._line[0] + self.start / self.target_s(1)

    @property
    def _line(self) -> tuple[float, float]:
        """The line of least squares through passes over two and more tokens, up to twice as many drafted as are best
        where drafts are good: its lead at one token, and its slope."""
        drafted = max(2, min(_ROUND, 2 * self.best_run(_GOOD)[1]))
        tokens = range(2, drafted + 2)
        slope, lead = linear_regression(tokens, [self.target_s(n) / self.target_s(1) - 1 for n in tokens])
        if slope < 0:
            return max(0.0, lead + slope * mean(tokens)), 0.0
        if (verify := lead + slope) < 0:
            return 0.0, max(0.0, self.target_s(1 + drafted) / self.target_s(1) - 1) / drafted
        return verify, slope

    @property
    def named(self) -> str:
        """``step``, ``token`` and ``verify`` as parameters in a spec: those of ``optimal`` and ``auto``."""
        return f"step={self.step:.2g}, token={self.token:.2g}, verify={self.verify:.2g}"

    @property
    def reads(self) -> str:
        """Costs of target passes over ``READS`` tokens in the same unit, as ``lookup`` takes them: 1.03x1.1x1.2x1.5."""
        costs = [1.0]
        for tokens in READS:
            costs.append(max(costs[-1], self.target_s(tokens) / self.target_s(1)))
        return "x".join(f"{cost:.3g}" for cost in costs[1:])

    def best_run(self, chance: float) -> tuple[float, int]:
        """Speed over plain decoding with the best number of draft tokens, if each is kept with this chance; and that
        number."""

        def round_s(drafted: int) -> float:
            return self.start + drafted * self.draft_s(1) + self.target_s(1 + drafted)

        token_s, length = best_length(chance, round_s, _LONGEST_RUN)
        return self.target_s(1) / token_s, length

    def speed_up(self, chance: float) -> float:
        """The speed of ``best_run``."""
        return self.best_run(chance)[0]

    def draft_s(self, tokens: float) -> float:
        """Seconds of a draft step that reads a (mean) number of tokens >= 1."""
        return _along(self.draft, tokens) if self.draft else 0.0


def best_length(chance: float, cost: Callable[[int], float], longest: int) -> tuple[float, int]:
    """The least cost of a token, and the number of draft tokens of a round that has it, up to ``longest``.

    Args:
        chance: that the target keeps a draft token, after those before it. cost: of a round of so many.
    """
    tokens, kept, costs = 1.0, 1.0, []
    for drafted in range(1, longest + 1):
        kept *= chance
        tokens += kept
        costs.append((cost(drafted) / tokens, drafted))
    return min(costs)


def _along(points: _Points, tokens: float) -> float:
    """Between the points on a line, and beyond the last one on that of the last two."""
    right = min(len(points) - 1, max(1, bisect_right([n for n, _ in points], tokens)))
    (low, low_s), (high, high_s) = points[right - 1], points[right]
    value = low_s + (high_s - low_s) * (tokens - low) / (high - low)
    return max(high_s, value) if tokens > high else value
