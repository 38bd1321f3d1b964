"""The target's verdicts on draft tokens, for rules that learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.draft import Draft, Scores
from sprinter.laws import overlap

__all__ = ["Verdicts"]


@dataclass(slots=True)
class Verdicts:
    """Holds a round's draft tokens until the target has scored them, and passes the verdicts on at the target call.

    A closing forward pass of the meter may score them earlier. The rules learn at the target call all the same, so that
    metering does not change texts.

    Attributes:
        needs: signals that the rules that learn read; None: no rule learns.
    """

    needs: frozenset[str] | None
    _waiting: list[tuple[int, Mapping[str, Tensor], Tensor]] = field(default_factory=list)
    _scored: list[tuple[Mapping[str, Tensor], Tensor]] = field(default_factory=list)

    def wait(self, position: int, answer: Draft, i: int) -> None:
        """Add token i of an answer, which stands at ``position`` of the text."""
        if self.needs is not None:
            signals = {name: answer.signals[name][i] for name in self.needs & answer.signals.keys()}
            self._waiting.append((position, signals, answer.laws[i]))

    def score(self, start: int, scores: Scores) -> None:
        """Take β at the waiting positions: row i of the scores is the law at position ``start + i + 1``."""
        rows = [position - start - 1 for position, *_ in self._waiting]
        count = sum(row < len(scores.laws) for row in rows)
        if count:
            q = torch.stack([law for *_, law in self._waiting[:count]])
            found = overlap(scores.at(rows[:count]), q).cpu()
            self._scored += [
                (signals, beta) for (_, signals, _), beta in zip(self._waiting[:count], found, strict=True)
            ]
            del self._waiting[:count]

    def take(self) -> tuple[dict[str, Tensor], Tensor] | None:
        """Signals ``[n]`` by name and overlaps ``[n]`` since the last target call; None: nothing was scored."""
        if not self._scored:
            return None
        signals, overlaps = zip(*self._scored, strict=True)
        self._scored.clear()
        return {name: torch.stack([one[name] for one in signals]) for name in signals[0]}, torch.stack(
            overlaps
        )
