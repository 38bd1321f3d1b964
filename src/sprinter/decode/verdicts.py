"""The target's verdicts on draft tokens, for trust rules that learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.draft import Draft, Scores
from sprinter.decode.trust import State, TrustRule
from sprinter.laws import overlap

__all__ = ["Verdicts"]


@dataclass(slots=True)
class Verdicts:
    """Holds a round's draft tokens until the target has scored them, and passes the verdicts on at the target call.

    A closing forward pass of the meter may score them earlier. The rule learns at the target call all the same, so that
    metering does not change texts.
    """

    rule: TrustRule
    _waiting: list[tuple[int, Mapping[str, Tensor], Tensor]] = field(default_factory=list)
    _scored: list[tuple[Mapping[str, Tensor], Tensor]] = field(default_factory=list)

    def wait(self, position: int, answer: Draft, i: int) -> None:
        """Add token i of an answer, which stands at ``position`` of the text."""
        if self.rule.learns:
            signals = {name: answer.signals[name][i] for name in self.rule.needs & answer.signals.keys()}
            self._waiting.append((position, signals, answer.laws[i]))

    def score(self, start: int, scores: Scores) -> None:
        """Take β at the waiting positions: row i of the scores is the law at position ``start + i + 1``."""
        rows = [position - start - 1 for position, *_ in self._waiting]
        count = sum(row < len(scores.laws) for row in rows)
        if count:
            p, q = scores.laws[rows[:count]], torch.stack([law for *_, law in self._waiting[:count]])
            found = overlap(p, q).cpu()
            self._scored += [
                (signals, beta) for (_, signals, _), beta in zip(self._waiting[:count], found, strict=True)
            ]
            del self._waiting[:count]

    def learn(self, state: State) -> State:
        """The rule's state after all verdicts since the last target call."""
        if not self._scored:
            return state
        signals, overlaps = zip(*self._scored, strict=True)
        self._scored.clear()
        columns = {name: torch.stack([one[name] for one in signals]) for name in signals[0]}
        return self.rule.learn(columns, torch.stack(overlaps), state)
