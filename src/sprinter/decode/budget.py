"""A budget on drift: how lossy a method may be at each token, so that the mean drift of a text keeps to a number.

Before a token is trusted, its drift is predicted: 1 − β by a logistic regression, which learns from the target's
verdicts as the text grows; the first draft tokens are all checked. It is trusted if the drift spent so far and that
expected of the unscored tokens, a standard deviation added, stay within the budget for the tokens so far. Among the
tokens that fit, those with the least expected drift are taken: up to the threshold whose mean over the last tokens
spends what is left in the next ones. The target's pass then gives the true drift in place of the expected one.

What a lossy accept rule costs is known before it decides: it judges a position if TV(π, p) fits, else the exact rule
does. A rule of chains, whose distance is at most 1 a round and known afterwards, judges a round if 1 fits.

All of this depends on laws and on the text before a token, never on the token itself: the drift of each position is
that of the rule that had it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Exact, Judge
from sprinter.decode.accept.base import TargetCall, control_of, decide, emitted
from sprinter.decode.draft import Token, Verdict
from sprinter.decode.regression import Fit, Regression
from sprinter.laws import tv_distance

__all__ = ["BUDGET_RUN", "Budget", "Within"]

BUDGET_RUN = 20
"""Maximum length of a run if the method names none: the target's pass corrects what was predicted."""
_MEMORY = 500  # verdicts, as in the rules that learn
_RECENT = 256  # tokens whose expected drifts choose the threshold
_AHEAD = 64  # tokens over which unspent budget is spent
_FIRST = 16  # verdicts before the first token may be trusted
_SURPRISES = 100  # verdicts over which the size of the prediction's errors is averaged
_MOST_SURPRISE = 25.0
_SLACK = 1e-9  # of sums


@dataclass(slots=True)
class Budget:
    """The account of one text.

    Attributes:
        limit: mean drift a token, above 0.
        names: signals that drifts are predicted from.
        begin: length of the prompt.
        spent: drift of the scored tokens so far.
        owed: expected drift and its variance of each trusted token that the target has not scored.
        expected: expected drift of all tokens that were trusted, as it was when they were.
        pending: drift and number of the tokens that a closing forward pass of the meter scored within a run. They count
            at the next target call, so that metering does not change texts.
    """

    limit: float
    names: tuple[str, ...]
    begin: int
    spent: float = 0.0
    owed: list[tuple[float, float]] = field(default_factory=list)
    expected: float = 0.0
    pending: tuple[float, int] = (0.0, 0)
    _regression: Regression = field(init=False)
    _fit: Fit | None = None
    _seen: int = 0
    _surprise: float = 1.0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _drafted: int = 0
    _next: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        self._regression = Regression("+".join(self.names) or "entropy", _MEMORY)

    def _expected(self, signals: Mapping[str, Tensor]) -> Tensor:
        """Expected drift if the token is trusted, float64, of the signals' shape."""
        regression = self._regression
        return 1 - regression.predict(signals, self._fit or regression.start())

    def allows(self, signals: Mapping[str, Tensor], position: int, wanted: bool | None) -> bool:
        """Whether the token at ``position`` may be trusted.

        Args:
            signals: at least ``names``, each ``[]``.
            wanted: what the trust rule says; None: the budget has its place.
        """
        drift = float(self._expected(signals))
        self._recent.append(drift)
        self._drafted += 1
        # The second part: what so few verdicts may have missed.
        variance = self._surprise * drift * (1 - drift) + 0.25 / (self._seen + 1)
        self._next = drift, variance
        if self._seen < _FIRST or not (drift <= self._threshold(position) if wanted is None else wanted):
            return False
        expected = drift + sum(one for one, _ in self.owed)
        error = math.sqrt(variance + sum(one for _, one in self.owed))
        return min(expected + error, len(self.owed) + 1.0) <= self._left(position)

    def _left(self, position: int) -> float:
        """What the scored tokens have left for the others, with the token at ``position``."""
        return self.limit * (position - self.begin + 1) - self.spent + _SLACK

    def _threshold(self, position: int) -> float:
        """The largest expected drift at which tokens are trusted."""
        written = max(1, position - self.begin)
        free = self._left(position) - sum(one for one, _ in self.owed)
        # The target's own tokens and copies spend nothing: what is written for each token that may, two at most.
        rate = (self.limit + free / _AHEAD) * min(2.0, max(1.0, written / self._drafted))
        ordered = sorted(self._recent)
        fits = sum(total <= rate * len(ordered) for total in accumulate(ordered))
        return ordered[fits - 1] if fits else -1.0

    def owe(self) -> None:
        """The token that was last allowed is trusted."""
        self.owed.append(self._next)
        self.expected += self._next[0]

    def pay(self, tokens: Iterable[Token]) -> None:
        """Tokens whose drift is known."""
        self.spent += sum(token.distance or 0.0 for token in tokens)

    def postpone(self, tokens: Sequence[Token]) -> None:
        """Tokens whose drift is known, and counts at the next target call."""
        drift, count = self.pending
        self.pending = drift + sum(token.distance or 0.0 for token in tokens), count + len(tokens)

    def settle(self) -> None:
        """All trusted tokens are scored."""
        self.spent, self.pending = self.spent + self.pending[0], (0.0, 0)
        self.owed.clear()

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor) -> None:
        """The target's verdicts on the last draft tokens, as in ``TrustRule.learn``."""
        expected, regression = self._expected(signals), self._regression
        drifts = 1 - overlaps.double()
        spread = (expected * (1 - expected)).clamp(min=1e-3)
        for surprise in ((drifts - expected).square() / spread).clamp(max=_MOST_SURPRISE).tolist():
            self._surprise += (surprise - self._surprise) / _SURPRISES
        self._fit = regression.learn(signals, overlaps, self._fit or regression.start())
        self._seen += len(overlaps)

    def fitting(self, drifts: Sequence[float], position: int) -> list[bool]:
        """Which positions from ``position`` on a rule may judge that has these drifts, if all before them are kept."""
        left, fits = self._left(position) - sum(one for one, _ in self.owed), []
        for drift in drifts:
            fits.append(drift <= left)
            left += self.limit - (drift if fits[-1] else 0.0)
        return fits


class Within(Judge):
    """A lossy accept rule within a budget; where it does not fit, the exact rule.

    Args:
        rule: judges one draft.
        budget: the text's account.
    """

    def __init__(self, rule: Judge, budget: Budget) -> None:
        self._rule, self._budget = rule, budget

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Those of the rule."""
        return self._rule.needs

    def judge(self, call: TargetCall) -> Verdict:
        """Judge position by position, or the chain as a whole, by the rule or exactly."""
        n, rule = len(call.tree.tokens), self._rule
        if n == 0:
            return call.plain()
        if not isinstance(rule, AcceptRule):
            fits = self._budget.fitting([1.0], call.position)
            return (rule if fits[0] else Exact()).judge(call)
        p, q, exact = call.p[:n], torch.stack(list(call.tree.laws)), Exact()
        b, r = rule.both(p, q, control_of(call, n))
        pi = emitted(q, b, r)
        drifts = tv_distance(pi, p).tolist()
        fits = self._budget.fitting(drifts, call.position)
        if not all(fits):
            own = torch.tensor(fits, device=p.device).unsqueeze(-1)
            b = torch.where(own, b, exact.keep(p, q))
            r = torch.where(own, r, exact.replacement(p, q))
            pi = torch.where(own, pi, p)
        return decide(
            call, b, r, pi, [drift if fit else 0.0 for drift, fit in zip(drifts, fits, strict=True)]
        )
