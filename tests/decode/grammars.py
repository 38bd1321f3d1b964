"""A grammar over few tokens, and pairs whose laws follow it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from sprinter.decode.enumerate import MarkovPair

Found = TypeVar("Found")


def _done(found: Found) -> Future[Found]:
    answer: Future[Found] = Future()
    answer.set_result(found)
    return answer


class ToyGrammar:
    """After each text some tokens are allowed, by a hash of it; often one. Forced tokens are those, and at times the
    first of two, as a usual spelling is.

    Args:
        free: nothing is forced, whatever is allowed.
    """

    def __init__(self, vocab: int = 3, seed: int = 0, free: bool = False) -> None:
        self.vocab, self.seed, self.free, self.asked = vocab, seed, free, 0

    def allowed(self, text: Sequence[int]) -> list[int]:
        number = self._number(text)
        first = number % self.vocab
        second = (first + 1 + number // 7 % (self.vocab - 1)) % self.vocab
        return [[first], [first, second], list(range(self.vocab))][number // 100 % 3]

    def follows(self, text: Sequence[int]) -> bool:
        return all(x in self.allowed(text[:i]) for i, x in enumerate(text))

    def masks(self, texts: Sequence[Sequence[int]]) -> Future[Tensor]:
        found = torch.ones(len(texts), self.vocab, dtype=torch.bool)
        for row, text in zip(found, texts, strict=True):
            if self.follows(text):
                row[[x for x in range(self.vocab) if x not in self.allowed(text)]] = False
        return _done(found)

    def kept(self, text: Sequence[int], tokens: Sequence[int]) -> Future[int]:
        fits = (i for i, x in enumerate(tokens) if x not in self.allowed([*text, *tokens[:i]]))
        return _done(next(fits, len(tokens)))

    def forced(self, text: Sequence[int]) -> Future[Sequence[int]]:
        found: list[int] = []
        while not self.free and len(found) < 3:
            allowed = self.allowed([*text, *found])
            if len(allowed) > 1 and not (len(allowed) == 2 and self._number([*text, *found]) % 2):
                break
            found.append(allowed[0])
        self.asked += bool(found)
        return _done(found)

    def law(self, text: Sequence[int], law: Tensor) -> Tensor:
        """A law after a text, followed; the second definition of what ``decode.adjust`` does."""
        chances = [float(one) * (x in self.allowed(text)) for x, one in enumerate(law.tolist())]
        if not self.follows(text):
            return law
        if sum(chances) == 0:
            chances = [float(x in self.allowed(text)) for x in range(self.vocab)]
        return torch.tensor(chances, dtype=torch.float64) / sum(chances)

    def _number(self, text: Sequence[int]) -> int:
        return int.from_bytes(hashlib.sha256(f"{self.seed}{list(text)}".encode()).digest()[:4])


class FollowingPair(MarkovPair):
    """A Markov pair whose two laws follow a grammar; the prompt is one token."""

    def __init__(self, grammar: ToyGrammar, seed: int, sharp: float = 1.0, zeros: float = 0.0) -> None:
        super().__init__(grammar.vocab, seed, sharp, zeros)
        object.__setattr__(self, "_grammar", grammar)

    def _law(self, which: str, prefix: tuple[int, ...]) -> Tensor:
        grammar: ToyGrammar = object.__getattribute__(self, "_grammar")
        return grammar.law(prefix[1:], super()._law(which, prefix))

    __hash__ = object.__hash__
