"""The meter: how far the text is from the target's law, and for how many tokens this is known.

The drift of a position is TV(π, p), where π is the law that the method gave that position: 0 where the target drew,
TV(q, p) where a token was trusted, the accept rule's own TV where it judged. The expected sum of drifts bounds the
total variation of the text.

If the decision to trust x depends on x itself, π differs from the accept rule's law π₀ only by what becomes of the
trusted x: x itself, where the rule would have left y with probability K₀(y) = b(x)·1{y = x} + (1 − b(x))·r(y). So
TV(π, p) <= TV(π₀, p) + Σ q(x)·(1 − K₀(x)), with the sum over the trusted x. Such a token is given the drift
TV(π₀, p) + 1 − K₀(x), whose expectation is this bound. Under exact acceptance the drift is max(0, 1 − p(x)/q(x)), and
the bound is attained.

The ratio of a token is p(x)/π(x). For a token whose trust depended on x it is K₀(x)·p(x)/π₀(x): min(1, ratio) is then
what target and method have in common at x, at least, as ``Record.count`` needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Exact
from sprinter.decode.accept.base import emitted, ratios_at
from sprinter.decode.draft import Control, LawPair, Scores, Token
from sprinter.laws import tv_distance

__all__ = ["Meter", "becomes", "control_at", "one_sample"]


@dataclass(slots=True)
class Meter:
    """Holds trusted tokens until the target has scored them.

    Attributes:
        rule: the accept rule that judges checked tokens; None: it has no law of single positions, and tokens trusted by
            their value have no drift.
        waiting: trusted tokens that the target has not scored: position, token, q, raw q, whether trust saw the token.
    """

    rule: AcceptRule | None = Exact()
    waiting: list[tuple[int, Token, Tensor, Tensor | None, bool]] = field(default_factory=list)

    def wait(
        self, position: int, token: Token, q: Tensor, saw_token: bool = False, raw_q: Tensor | None = None
    ) -> None:
        """Add a token that was trusted at ``position`` of the text and drawn from ``q [V]``.

        Args:
            saw_token: whether the decision to trust it depended on x. Its drift is then the one-sample form (see
                ``decode.meter``) instead of TV(q, p).
            raw_q: the raw law ``[V]`` if the accept rule decides on raw laws.
        """
        self.waiting.append((position, token, q, raw_q, saw_token))

    def score(self, start: int, scores: Scores) -> None:
        """Fill in the drift of the waiting tokens: row i of the scores is the law at position ``start + i + 1``."""
        whole = []
        for position, token, q, raw_q, saw_token in self.waiting:
            row = position - start - 1
            if saw_token and self.rule is not None:
                pair, itself = LawPair(scores.laws[row], q), torch.zeros_like(q)
                itself[token.id] = 1.0
                control = control_at(row, scores.laws, scores.raw, q, raw_q, scores.heads)
                token.drift, token.ratio = one_sample(self.rule, pair, control, token.id, token.id, itself)
            elif not saw_token and (known := scores.metered.get(position)):
                token.drift, token.ratio = known
            elif not saw_token:
                whole.append((row, token, q))
        if whole:
            rows, tokens, laws = zip(*whole, strict=True)
            p, q = scores.at(rows), torch.stack(laws)
            ratios = ratios_at([token.id for token in tokens], p, q)
            for token, drift, ratio in zip(tokens, tv_distance(p, q).tolist(), ratios, strict=True):
                token.drift, token.ratio = drift, ratio
        self.waiting.clear()


def one_sample(
    rule: AcceptRule, laws: LawPair, control: Control | None, x: int, y: int, own: Tensor
) -> tuple[float, float]:
    """(drift, ratio) of a position where x was trusted because of its value, see ``decode.meter``.

    Args:
        rule: the accept rule that would have judged x. laws, control: of the position, each law ``[V]``.
        y: the token in the text. own: the law ``[V]`` of what becomes of the trusted x, one-hot if it stays.
    """
    b, r = rule.both(*laws, control)
    usual = becomes(x, b, r)
    drift, ratio = float(tv_distance(own, usual)), float(usual[y] / own[y])
    if not rule.lossless:
        pi = emitted(laws.q, b, r)
        drift += float(tv_distance(pi, laws.p))
        ratio *= float(laws.p[y] / pi[y]) if ratio > 0 else 1.0
    return drift, ratio


def control_at(
    row: int, p: Tensor, raw_p: Tensor | None, q: Tensor, raw_q: Tensor | None, heads: Mapping[str, Tensor]
) -> Control | None:
    """The ``control`` of one position: ``p`` and ``raw_p [n, V]`` and ``heads [n]`` at a row, q and raw q ``[V]``."""
    scores = {kind: values[row] for kind, values in heads.items()}
    if raw_p is not None and raw_q is not None:
        return Control(raw_p[row], raw_q, scores)
    return Control(p[row], q, scores) if scores else None


def becomes(x: int, b: Tensor, r: Tensor) -> Tensor:
    """The law ``[V]`` of what a rule with b and r, each ``[V]``, leaves of x."""
    law = (1 - b[x]) * r
    law[x] += b[x]
    return law
