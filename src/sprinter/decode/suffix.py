"""Suffix decoding: drafts what most often followed the text's ending, in this text and in earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from sprinter.decode.checks import count, flag, number
from sprinter.decode.copies import FREE, LONGEST_COPY, NO_COPY, Copier, Copies, Copy, Worth
from sprinter.decode.costs import MEASURED, STEP
from sprinter.decode.drafter import NOTHING, Context, Drafter
from sprinter.decode.registry import DRAFTER
from sprinter.decode.suffix_index import END, LEAST, Occurrences, TextIndex
from sprinter.errors import UserError
from sprinter.random import Purpose

__all__ = ["Suffix"]


@DRAFTER.rule("suffix")
@dataclass(frozen=True)
class Suffix(Copies):
    """SuffixDecoding (Oliaro et al. 2024): walks down trees of the suffixes of this text and of earlier ones.

    A pattern is an ending of the text that stood before. Below its node in the tree, each token has the share of the
    pattern's occurrences that it followed. A draft goes to the most frequent token again and again, and its score is
    the sum of its path probabilities, the number of tokens expected to be kept. A pattern of m tokens gives a draft of
    at most ``factor`` times m. The draft of the highest score is proposed, of all patterns in both trees.

    Its law is one-hot, as the most frequent token is chosen without chance. With ``drawn=True`` the tree and pattern
    are chosen in the same way, but each token is drawn from the shares at its node, and these are its law: under exact
    acceptance it is kept with the overlap of shares and p, not with p of the most frequent token.

    Args:
        depth: longest pattern, tokens. least: shortest.
        factor: draft tokens for each token of the pattern (α in the paper).
        min_prob: a draft ends behind a token whose path probability is below this.
        drawn: draw from the shares, do not choose the most frequent token.
        otherwise, length, reads, step: as for ``Copies``. With costs, the chance of a token is its share of what an
            ending of this length promises.
    """

    depth: int = count(64, LEAST, 256)
    least: int = count(LEAST, LEAST)
    factor: float = number(1.0, 0.0, 64.0)
    min_prob: float = number(0.1, 0.0, 1.0)
    drawn: bool = flag(False)
    otherwise: Drafter = NOTHING
    length: int = count(15, 1, LONGEST_COPY)
    reads: str = FREE
    step: float | str = number(STEP, 0.0, 100.0, MEASURED)
    reads_earlier: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Copies.__post_init__(self)
        if self.least > self.depth:
            raise UserError(f"least={self.least} is out of range: give at most depth={self.depth}")

    def copier(self) -> Copier:
        """What walks down the trees, with one of its text."""
        return _SuffixCopier(self)


class _Branch(NamedTuple):
    """A way down a tree: the pattern's length, what followed its occurrences, and each token's share of them."""

    size: int
    rows: Sequence[Sequence[int]]
    tokens: list[int]
    shares: list[float]
    score: float


_NOWHERE = _Branch(0, (), [], [], 0.0)


class _SuffixCopier(Copier):
    def __init__(self, drafter: Suffix) -> None:
        self._drafter, self._worth = drafter, Worth.of(drafter)
        self._own = TextIndex(drafter.depth)

    def plan(self, context: Context) -> Copy:
        drafter, worth, text = self._drafter, self._worth, context.text
        if worth is not None and worth.never:
            return NO_COPY
        if worth is not None:
            worth.learn(text)
        self._own.extend(text[len(self._own) :])
        best, earlier = _NOWHERE, context.earlier
        for found in (
            self._own.find(drafter.length),
            None if earlier is None else earlier.find(text[-drafter.depth :], drafter.length),
        ):
            if found is not None:
                best = _best(drafter, found, best, worth)
        if not best.tokens:
            return NO_COPY
        tokens, laws = _drawn(best, context) if drafter.drawn else (best.tokens, None)
        if worth is None:
            return Copy(tokens, laws)
        worth.copied = (len(text), tokens, best.size)
        return Copy(tokens, laws, best.score)


def _best(drafter: Suffix, found: Occurrences, best: _Branch, worth: Worth | None) -> _Branch:
    """The branch of the highest score; of equal ones the first: that of the text, of the longest pattern.

    With costs, a branch is as long as pays, and its score is what it gains. Then the latest occurrence of the longest
    pattern is a branch, too.
    """
    if worth is not None and found.sizes[0] >= drafter.least:
        size, row = found.sizes[0], found.rows[0][: int(drafter.factor * found.sizes[0])]
        length, gain = worth.paying(size, row.index(END) if END in row else len(row))
        if gain > best.score:
            best = _Branch(size, found.rows[:1], row[:length], [], gain)
    for i, size in enumerate(found.sizes):
        most = min(drafter.length, int(drafter.factor * size))
        if size < drafter.least or most <= best.score:  # the score of a draft is at most its length
            break
        if i + 1 == len(found.sizes) or found.sizes[i + 1] < size:  # the last occurrence of this pattern
            if worth is not None and not worth.paying(size, most)[0]:
                continue  # though all occurrences went on alike
            branch = _down(size, found.rows[: i + 1], most, drafter.min_prob)
            if worth is not None:
                length, gain = worth.paying(size, len(branch.tokens), branch.shares)
                branch = branch._replace(tokens=branch.tokens[:length], score=gain)
            best = branch if branch.score > best.score else best
    return best


def _down(size: int, rows: Sequence[Sequence[int]], most: int, min_prob: float) -> _Branch:
    """From a pattern to the most frequent token, and on from there; of equally frequent ones the latest."""
    tokens, shares, left, prob, score = list[int](), list[float](), rows, 1.0, 0.0
    while len(tokens) < most and prob >= min_prob:
        if len(left) == 1:  # all that is left
            row = left[0][len(tokens) : most]
            row = row[: row.index(END)] if END in row else row
            shares, score = shares + [1.0] * len(row), score + prob * len(row)
            return _Branch(size, rows, [*tokens, *row], shares, score)
        counts = _counts(left, len(tokens))
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        shares.append(counts[token] / len(left))
        prob *= shares[-1]
        score += prob
        left = [row for row in left if row[len(tokens)] == token]
        tokens.append(token)
    return _Branch(size, rows, tokens, shares, score)


def _drawn(branch: _Branch, context: Context) -> tuple[list[int], torch.Tensor]:
    """Tokens drawn from the shares, on the tree and to the depth that a branch has: neither depends on these draws."""
    tokens, laws, left = list[int](), list[torch.Tensor](), branch.rows
    while len(tokens) < len(branch.tokens) and (counts := _counts(left, len(tokens))):
        law = context.like.new_zeros(context.vocab)
        law[list(counts)] = law.new_tensor(list(counts.values())) / sum(counts.values())
        place = len(context.text) + len(tokens)
        token = context.draws.token(law, context.round, place, Purpose.DRAFT)
        left = [row for row in left if row[len(tokens)] == token]
        tokens.append(token)
        laws.append(law)
    return tokens, torch.stack(laws)


def _counts(rows: Sequence[Sequence[int]], place: int) -> dict[int, int]:
    """How often each token followed."""
    counts: dict[int, int] = {}
    for row in rows:
        if (token := row[place]) >= 0:
            counts[token] = counts.get(token, 0) + 1
    return counts
