"""A budget on drift: at every token of a text, Σ drift <= limit × tokens so far.

Nothing is final before the target has scored it, and then its drift is known before it is decided on: a position is
judged by the lossy rule if its drift fits, together with all that was spent before, else by the exact rule. For accept
rules the drift is TV(π, p) of their own law; for trusted tokens, which stay as they are, TV(q, p). A rule of chains,
whose distance is at most 1 a round and known afterwards, judges a round if 1 fits.

For trusted tokens the drift is also predicted before the target is called, to end runs where the target would refuse:
1 − β by a logistic regression, which learns from the target's verdicts as the text grows. Among the tokens that fit,
those with the least expected drift are taken: up to the threshold whose mean over the last tokens spends what is left
in the next ones. A wrong prediction costs draft steps, no drift.

All of this depends on laws and on the text before a token, not on the token itself, unless the trust rule does: the
drift of each position is that of the rule that had it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Exact, Judge
from sprinter.decode.accept.base import TargetCall, Verdict, control_of, decide, emitted
from sprinter.decode.method import Method
from sprinter.decode.regression import Fit, Regression
from sprinter.laws import tv_distance

__all__ = ["BUDGET_RUN", "BudgetedRule", "DriftAccount"]

BUDGET_RUN = 20
"""Maximum number of trusted tokens in a run, and length of a run if the method names none."""
_MEMORY = 500  # verdicts, as in the rules that learn
_RECENT = 256  # tokens whose expected drifts choose the threshold
_AHEAD = 64  # tokens over which unspent budget is spent
_SLACK = 1e-9  # of sums


@dataclass(slots=True)
class DriftAccount:
    """The account of one text.

    Attributes:
        limit: mean drift a token, above 0.
        names: signals that drifts are predicted from.
        begin: length of the prompt.
        spent: drift of the text so far.
    """

    limit: float
    names: tuple[str, ...]
    begin: int
    spent: float = 0.0
    _regression: Regression = field(init=False)
    _fit: Fit | None = None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _drafted: int = 0
    _run: list[float] = field(default_factory=list)  # expected drifts of the run's trusted tokens

    @classmethod
    def of(cls, method: Method, prompt: int) -> DriftAccount | None:
        """The account of a text behind a prompt of so many tokens; None: the method has no budget, or is lossless."""
        if not method.budget or method.lossless():
            return None
        return cls(method.budget, method.predicts, prompt)

    def __post_init__(self) -> None:
        self._regression = Regression("+".join(self.names) or "entropy", _MEMORY)

    def begin_run(self) -> None:
        """No token of the next run is trusted yet."""
        self._run.clear()

    def allows(self, signals: Mapping[str, Tensor], position: int, wanted: bool | None) -> bool:
        """Whether the token at ``position`` may be trusted.

        Args:
            signals: at least ``names``, each ``[]``.
            wanted: what the trust rule says; None: the budget has its place.
        """
        drift = float(1 - self._regression.predict(signals, self._fit or self._regression.start()))
        self._recent.append(drift)
        self._drafted += 1
        wanted = drift <= self._threshold(position) if wanted is None else wanted
        if not wanted or len(self._run) == BUDGET_RUN or drift > self._left(position):
            return False
        self._run.append(drift)
        return True

    def _left(self, position: int) -> float:
        """What is left for the token at ``position``, if the run's trusted tokens drift as expected."""
        return self.limit * (position - self.begin + 1) - self.spent - sum(self._run) + _SLACK

    def _threshold(self, position: int) -> float:
        """The largest expected drift at which tokens are trusted."""
        written = max(1, position - self.begin)
        # The target's own tokens and copies spend nothing: what is written for each token that may, two at most.
        rate = (self.limit + self._left(position) / _AHEAD) * min(2.0, max(1.0, written / self._drafted))
        ordered = sorted(self._recent)
        fits = sum(total <= rate * len(ordered) for total in accumulate(ordered))
        return ordered[fits - 1] if fits else -1.0

    def learn(self, signals: Mapping[str, Tensor], overlaps: Tensor) -> None:
        """The target's verdicts on the last draft tokens, as in ``TrustRule.learn``."""
        self._fit = self._regression.learn(signals, overlaps, self._fit or self._regression.start())

    def fitting(self, drifts: Sequence[float], position: int) -> list[bool]:
        """Which positions from ``position`` on a rule may judge that has these drifts, if all before them are kept."""
        left, fits = self.limit * (position - self.begin + 1) - self.spent + _SLACK, []
        for drift in drifts:
            fits.append(drift <= left)
            left += self.limit - (drift if fits[-1] else 0.0)
        return fits


class BudgetedRule(Judge):
    """A lossy accept rule within a budget; where it does not fit, the exact rule.

    Args:
        rule: judges one draft.
        account: of the text.
    """

    def __init__(self, rule: Judge, account: DriftAccount) -> None:
        self._rule, self._account = rule, account

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
            fits = self._account.fitting([1.0], call.position)
            return (rule if fits[0] else Exact()).judge(call)
        p, q, exact = call.p[:n], torch.stack(list(call.tree.laws)), Exact()
        b, r = rule.both(p, q, control_of(call, n))
        pi = emitted(q, b, r)
        drifts = tv_distance(pi, p).tolist()
        fits = self._account.fitting(drifts, call.position)
        if not all(fits):
            own = torch.tensor(fits, device=p.device).unsqueeze(-1)
            b = torch.where(own, b, exact.keep(p, q))
            r = torch.where(own, r, exact.replacement(p, q))
            pi = torch.where(own, pi, p)
        return decide(
            call, b, r, pi, [drift if fit else 0.0 for drift, fit in zip(drifts, fits, strict=True)]
        )
