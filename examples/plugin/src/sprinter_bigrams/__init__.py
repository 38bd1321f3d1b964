"""A drafter for Sprinter: the next token by what followed the last one in the text so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from sprinter.decode import Context, Drafter, Fixed, Method, Proposal, Proposer, Purpose, at_least

__all__ = ["Bigrams", "bigrams"]


@dataclass(frozen=True)
class Bigrams(Drafter):
    """Draft x with the chance count(w, x) / count(w), w being the text's last token; nothing after a w that is new.

    Args:
        least: draft only after tokens that occurred so many times before.
    """

    least: int = 1

    def __post_init__(self) -> None:
        at_least("least", self.least, 1)

    @property
    def uses_model(self) -> bool:
        """No draft model is needed."""
        return False

    @property
    def needs_target(self) -> bool:
        """Where there is nothing to propose."""
        return True

    @property
    def proposer(self) -> Callable[[], Proposer]:
        """Counts the text's bigrams at each proposal."""
        return lambda: _Proposer(self.least)


class _Proposer(Proposer):
    def __init__(self, least: int) -> None:
        self._least = least

    def propose(self, context: Context) -> Proposal:
        """Tokens drawn one by one, each with its law."""
        text, tokens, laws = list(context.text), list[int](), list[torch.Tensor]()
        while len(tokens) < context.at_most:
            counts = Counter(after for before, after in pairwise(text) if before == text[-1])
            if counts.total() < self._least:
                break
            law = context.like.new_zeros(context.vocab)
            law[list(counts)] = law.new_tensor(list(counts.values())) / counts.total()
            tokens.append(context.draws.token(law, context.round, len(text), Purpose.DRAFT))
            laws.append(law)
            text.append(tokens[-1])
        return Proposal(tokens, torch.stack(laws) if laws else context.like.new_zeros(0, context.vocab))


def bigrams(*, least: int = 1, gamma: int = 5) -> Method:
    """Up to ``gamma`` tokens a round, exact acceptance."""
    return Method(drafter=Bigrams(least), stop=Fixed(gamma))


bigrams.paper = "example of the Sprinter project"  # type: ignore[attr-defined]
