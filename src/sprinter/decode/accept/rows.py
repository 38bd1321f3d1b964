"""Verdicts on chains of many texts as functions of tensors, without a look at their values: for a device.

They are those of ``Exact`` and ``Match``, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sprinter.decode.accept.base import Judge, chances
from sprinter.decode.accept.exact import Exact
from sprinter.decode.accept.match import Match
from sprinter.laws import residual, tv_distance

__all__ = ["judge_exact", "judge_match", "judged_in_rows", "meter"]

Draw = Callable[[Tensor, Tensor], Tensor]
"""A token from each of some laws ``[k, V]``, by the addresses at ``[k]`` of the rows · (n + 1) places of chains."""


def judged_in_rows(rule: Judge) -> str | None:
    """The name of a rule whose verdicts are here; None: it has none."""
    return {Exact: "exact", Match: "match"}.get(type(rule))


def judge_exact(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    counts: Tensor,
    uniforms: Tensor,
    draw: Draw,
    trusted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``Exact``: how many tokens of each chain stay, and the token that follows them, ``[rows]`` each.

    Args:
        p: the target's laws ``[rows, n + 1, V]``. q, tokens: of the draft, ``[rows, n, V]`` and ``[rows, n]``.
        counts: lengths of the chains, at most n. uniforms: ``[rows, n]``, which decide whether a token stays.
        trusted: number of each chain's first tokens that stay in any case; None: 0.
    """
    n = tokens.shape[1]
    mine, yours = (law[:, :n].gather(-1, tokens[..., None])[..., 0] for law in (p, q))
    accepted = _first(uniforms < chances(mine, yours).double(), counts, trusted)
    own, drafted = _at(p, accepted), _at(q, accepted.clamp(max=n - 1))
    law = torch.where((accepted < counts)[:, None], residual(own, drafted), own)
    return accepted, draw(law, _places(accepted, n))


def judge_match(
    p: Tensor, tokens: Tensor, counts: Tensor, draw: Draw, trusted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``Match``; arguments as of ``judge_exact``."""
    (rows, n), every = tokens.shape, torch.arange(p.shape[0] * p.shape[1], device=p.device)
    drawn = draw(p.flatten(0, 1), every).view(rows, n + 1)
    accepted = _first(drawn[:, :n] == tokens, counts, trusted)
    return accepted, drawn.gather(1, accepted[:, None])[:, 0]


def meter(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Drift and ratio, ``[rows, n]`` each, of drafted tokens that were trusted without a look at them, see
    ``decode.meter``; arguments as of ``judge_exact``."""
    p = p[:, : tokens.shape[1]]
    mine, yours = (law.gather(-1, tokens[..., None])[..., 0] for law in (p, q))
    return tv_distance(p, q), torch.where(yours > 0, mine / yours, 1.0)


def _first(kept: Tensor, counts: Tensor, trusted: Tensor | None) -> Tensor:
    """Number of tokens before the first one that is not kept, in chains of so many."""
    each = torch.arange(kept.shape[1], device=kept.device)
    kept = kept if trusted is None else kept | (each < trusted[:, None])
    return (kept & (each < counts[:, None])).long().cumprod(1).sum(1)


def _at(laws: Tensor, places: Tensor) -> Tensor:
    return laws.gather(1, places[:, None, None].expand(-1, 1, laws.shape[-1]))[:, 0]


def _places(at: Tensor, n: int) -> Tensor:
    return torch.arange(len(at), device=at.device) * (n + 1) + at
