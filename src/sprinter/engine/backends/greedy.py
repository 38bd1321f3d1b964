"""Greedy target passes: where all rows take the most probable token, a verdict needs no law.

The target's law is one-hot, so every exact rule keeps draft tokens as long as they are the most probable ones, and
replaces the first that differs by it (Leviathan et al. 2023, Algorithm 1, at temperature 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor

from sprinter.decode.accept.rows import judged_in_rows
from sprinter.decode.spec import Method
from sprinter.engine.backends.base import Scored, TargetRow
from sprinter.laws import Sampling, first_largest, process
from sprinter.random import AddressedDraws, Draws, PositionDraws

__all__ = ["KNOWN", "greedy_scores", "judges_greedily", "likeliest_tokens"]

KNOWN = AddressedDraws, PositionDraws
"""Draws whose number of calls nobody counts."""


def judges_greedily(method: Method, sampling: Sampling, draws: Draws) -> bool:
    """Whether each chain that the target is asked about stays as far as its tokens are the most probable ones."""
    greedy = sampling.temperature == 0 and type(draws) in KNOWN
    return greedy and method.trust.never and judged_in_rows(method.accept) is not None


def likeliest_tokens(logits: Tensor, counts: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Of ``logits [tokens, V]`` of rows, one after the other, the most probable tokens and their logits by row; NaN is
    the largest."""
    ids = first_largest(logits)
    tokens, peaks = ids[:, 0].tolist(), logits.gather(-1, ids)[:, 0].tolist()
    return [
        (tokens[end - n : end], peaks[end - n : end])
        for n, end in zip(counts, accumulate(counts), strict=True)
    ]


def greedy_scores(row: TargetRow, logits: Tensor, likeliest: list[int], seconds: float) -> Scored:
    """What the target says of a row: the token that follows, with a draft the verdict, and what makes the laws.

    Args:
        logits: ``[n, V]`` after each token of the row. likeliest: their most probable tokens. seconds: its share.
    """
    make, n = partial(process, logits, row.sampling), row.drafted
    if not n:
        return Scored(make, None, seconds, token=likeliest[-1], likeliest=likeliest)
    draft, own = row.feed.tokens[-n:], likeliest[-n - 1 :]
    kept = next((i for i in range(n) if draft[i] != own[i]), n)
    return Scored(make, None, seconds, token=own[kept], accepted=kept, likeliest=likeliest)
