"""Reduce laws over a large vocabulary to fewer outcomes: the most likely tokens stay single, all others are grouped.

The probability of a group is the sum of its tokens'. No group mixes tokens with p > q and tokens with p < q, so
TV(p, q) and the overlap, and with them exact acceptance, do not change. Rules that depend on single small probabilities
(OPT's slack, typical acceptance) are approximated, the better the smaller the groups are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["FULL", "condense_laws", "group_laws", "grouping", "split_rest"]

FULL = 4096
"""Vocabularies up to this size are not reduced."""
KEPT, GROUPS = 1024, 64


def grouping(p: Tensor, q: Tensor, kept: int = KEPT, groups: int = GROUPS) -> tuple[Tensor, Tensor]:
    """Outcomes of one position: (outcome of each token ``[V]``, ids of the single tokens ``[kept]``).

    The tokens with the largest max(p, q) stay single. The others, in order of p/q, form groups of about equal mass: the
    first half of the groups where p < q, the second where p >= q.
    """
    alone = torch.maximum(p, q).topk(kept).indices
    others = torch.ones(len(p), dtype=torch.bool).index_fill(0, alone, False).nonzero().squeeze(-1)
    mass = (p + q).double()
    order = others[(p[others] / q[others].clamp(min=1e-38)).argsort()]
    outcome = torch.empty(len(p), dtype=torch.long)
    outcome[alone] = torch.arange(kept)
    half = groups // 2
    worse = p[order] < q[order]
    for tokens, first in ((order[worse], kept), (order[~worse], kept + half)):
        share = mass[tokens].cumsum(0) / mass[tokens].sum().clamp(min=1e-300)
        outcome[tokens] = first + (share * half).ceil().long().clamp(1, half) - 1
    return outcome, alone


def group_laws(
    laws: Sequence[Tensor], tokens: Tensor, kept: int = KEPT, groups: int = GROUPS
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Group the laws of n positions.

    Args:
        laws: p, q and others over the vocabulary, each ``[n, V]``; the first two decide the groups.
        tokens: token ids ``[n]``.

    Returns:
        (laws on outcomes, the tokens' outcomes ``[n]``, ids of the outcomes ``[n, kept + groups]``, −1 for a group).
    """
    found = [grouping(p, q, kept, groups) for p, q in zip(laws[0], laws[1], strict=True)]
    place = torch.stack([outcome for outcome, _ in found])
    ids = torch.stack([alone for _, alone in found])
    ids = torch.cat([ids, torch.full((len(ids), groups), -1)], -1)
    on = tuple(torch.zeros(ids.shape, dtype=law.dtype).scatter_add_(-1, place, law) for law in laws)
    return on, place.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), ids


def condense_laws(
    laws: Sequence[Tensor], tokens: Tensor, kept: int = 256
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """As ``group_laws``, much faster, with a single group where p < q and one where p >= q.

    The most likely token of every law stays single.
    """
    p, q = laws[:2]
    score = torch.maximum(p, q)
    for law in laws:
        score = score.scatter(-1, law.argmax(-1, keepdim=True), torch.inf)
    alone = score.topk(kept).indices
    worse = p < q
    on = []
    for law in laws:
        single = law.gather(-1, alone)
        low = torch.where(worse, law, 0.0).sum(-1) - torch.where(worse.gather(-1, alone), single, 0.0).sum(-1)
        rest = law.sum(-1) - single.sum(-1) - low
        on.append(torch.cat([single, torch.stack([low, rest], -1).clamp(min=0)], -1))
    found, place = (alone == tokens.unsqueeze(-1)).max(-1)
    group = kept + (~worse.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)).long()
    ids = torch.cat([alone, alone.new_full((len(alone), 2), -1)], -1)
    return tuple(on), torch.where(found, place, group), ids


def split_rest(
    rest_p: Tensor, rest_q: Tensor, overlap: Tensor, groups: int = GROUPS
) -> tuple[Tensor, Tensor]:
    """Laws on ``groups`` outcomes, ``[n, groups]``, for tokens of which only p, q and Σ min(p, q) are known, ``[n]``.

    Half of the overlap is assigned to tokens with p < q, half to tokens with p > q. Each half of the groups divides its
    mass equally, so that single outcomes are about as small as tokens.
    """
    half = groups // 2
    common = torch.minimum(overlap, torch.minimum(rest_p, rest_q)).clamp(min=0) / 2
    p = torch.stack([common, rest_p - common], -1).repeat_interleave(half, -1) / half
    q = torch.stack([rest_q - common, common], -1).repeat_interleave(half, -1) / half
    return p, q
