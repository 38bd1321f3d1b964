"""The meter: how far is the text from the target's law, and how much of it was looked at.

drift of a position = TV(π, p), π the law that the method really gave that position: 0 where the target drew, TV(q, p)
where a token was trusted, the accept rule's own TV where it judged. The expected sum of drifts bounds the total
variation of the whole text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.draft import Scores, Token
from sprinter.laws import tv_distance

__all__ = ["Meter"]


@dataclass(slots=True)
class Meter:
    """Holds trusted tokens until the target has scored them."""

    _waiting: list[tuple[int, Token, Tensor, bool]] = field(default_factory=list)

    def wait(self, position: int, token: Token, q: Tensor, saw_token: bool = False) -> None:
        """A token trusted at ``position`` of the text, drawn from ``q [V]``.

        Args:
            saw_token: whether the choice not to check it looked at x. Its drift is then max(0, 1 − p(x)/q(x)), unbiased
                with exact acceptance of what is checked, instead of TV(q, p).
        """
        self._waiting.append((position, token, q, saw_token))

    @property
    def waiting(self) -> int:
        """Trusted tokens still unscored."""
        return len(self._waiting)

    def score(self, start: int, scores: Scores) -> None:
        """Settle what waits: row i of the scores is the law at position ``start + i + 1``."""
        whole = []
        for position, token, q, saw_token in self._waiting:
            if saw_token:
                token.drift = self._one_sample(scores.laws[position - start - 1], q, token.id)
            else:
                whole.append((position - start - 1, token, q))
        if whole:
            rows, tokens, laws = zip(*whole, strict=True)
            together = rows[-1] - rows[0] + 1 == len(rows)  # as a rule: a slice costs less than a choice
            p = scores.laws[rows[0] : rows[-1] + 1] if together else scores.laws[list(rows)]
            drifts = tv_distance(p, torch.stack(laws)).tolist()
            for token, drift in zip(tokens, drifts, strict=True):
                token.drift = drift
        self._waiting.clear()

    @staticmethod
    def _one_sample(p: Tensor, q: Tensor, x: int) -> float:
        return max(0.0, 1.0 - float(p[x]) / float(q[x]))
