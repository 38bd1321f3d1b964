"""Draft steps of several drafts at once: one forward pass over a tree's newest nodes, one draw for each draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.engine.rows import CacheRows, Feed
from sprinter.errors import SprinterError
from sprinter.laws import Sampling, process, raw_law
from sprinter.random import Draws, Purpose

__all__ = ["TreeDrafted", "TreeRow", "TreeSteps"]


@dataclass(slots=True)
class TreeRow:
    """One row of such a step.

    Attributes:
        feed: the text's unread tokens, or the nodes that the last step made.
        ends: of each draft, the place in the feed of the token that it goes on from.
        position: place in the text of the tokens to be drawn; ``round`` and the draft's number complete the address.
        raw: whether raw laws are wanted.
    """

    feed: Feed
    ends: Sequence[int]
    position: int
    round: int
    draws: Draws
    sampling: Sampling
    raw: bool = False


@dataclass(slots=True)
class TreeDrafted:
    """One token of each draft, the law ``[V]`` it was drawn from, perhaps the raw one; the row's time in seconds."""

    tokens: list[int]
    laws: list[Tensor]
    raws: list[Tensor]
    draft_s: float


class TreeSteps:
    """Steps for some rows, each at most once, on any runner that reads trees.

    The forward pass is captured where the runner captures trees; laws are made one operation at a time.
    """

    def __init__(self, rows: CacheRows) -> None:
        self._rows = rows

    def __call__(self, rows: Sequence[TreeRow]) -> list[TreeDrafted | SprinterError]:
        """For each row, in order, what it drafted; or what is wrong with it, and its neighbours are none the worse."""
        began = time.perf_counter()
        with torch.inference_mode():
            result = self._rows.read([row.feed for row in rows])
            drafted: list[TreeDrafted | SprinterError] = [
                result.faults.get(i) or _draw(row, result.logits[i]) for i, row in enumerate(rows)
            ]
        seconds = (time.perf_counter() - began) / len(rows)
        for one in drafted:
            if isinstance(one, TreeDrafted):
                one.draft_s = seconds
        return drafted


def _draw(row: TreeRow, logits: Tensor) -> TreeDrafted:
    """One token for each draft; drafts that go on from the same token share its law. ``logits [n, V]``."""
    places = sorted(set(row.ends))
    index = {place: i for i, place in enumerate(places)}
    laws = process(logits[places], row.sampling)
    raws = raw_law(logits[places]) if row.raw else None
    own = [index[end] for end in row.ends]
    tokens = [
        row.draws.token(laws[at], row.round, row.position, Purpose.DRAFT, n) for n, at in enumerate(own)
    ]
    return TreeDrafted(
        tokens, [laws[at] for at in own], [] if raws is None else [raws[at] for at in own], 0.0
    )
