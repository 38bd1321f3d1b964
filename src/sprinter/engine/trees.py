"""Draft steps of several drafts at once: one forward pass over the newest nodes of a tree, one draw per draft."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjust
from sprinter.engine.rows import CacheRows, Feed
from sprinter.errors import SprinterError
from sprinter.laws import Sampling, process, raw_law
from sprinter.random import Draws, Purpose

__all__ = ["TreeDrafted", "TreeRow", "TreeSteps"]


@dataclass(slots=True)
class TreeRow:
    """One row of a draft step with several drafts.

    Attributes:
        feed: the text's unread tokens, or the nodes of the last step.
        ends: for each draft, the index in the feed of its last token.
        position: position in the text of the tokens to draw; ``round`` and the draft's index complete the address.
        raw: whether to return raw laws.
        adjust: adjusts the logits after the tokens in ``ends``, in the order of the feed, each once.
    """

    feed: Feed
    ends: Sequence[int]
    position: int
    round: int
    draws: Draws
    sampling: Sampling
    raw: bool = False
    adjust: Adjust | None = None


@dataclass(slots=True)
class TreeDrafted:
    """One token per draft, the laws ``[V]`` they were drawn from, raw laws if asked for; the row's time in seconds."""

    tokens: list[int]
    laws: list[Tensor]
    raws: list[Tensor]
    draft_s: float


class TreeSteps:
    """Draft steps for some rows, each at most once, on any runner that supports trees.

    The forward pass is captured if the runner captures trees; laws are computed eagerly.
    """

    def __init__(self, rows: CacheRows) -> None:
        self._rows = rows

    def __call__(self, rows: Sequence[TreeRow]) -> list[TreeDrafted | SprinterError]:
        """Return, for each row in order, its tokens or its error; an error does not affect other rows."""
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
    """Draw one token per draft; drafts with the same last token share its law. ``logits [n, V]``."""
    places = sorted(set(row.ends))
    index = {place: i for i, place in enumerate(places)}
    logits = logits[places]
    laws = process(logits if row.adjust is None else row.adjust(logits), row.sampling)
    raws = raw_law(logits) if row.raw else None
    own = [index[end] for end in row.ends]
    tokens = [
        row.draws.token(laws[at], row.round, row.position, Purpose.DRAFT, n) for n, at in enumerate(own)
    ]
    return TreeDrafted(
        tokens, [laws[at] for at in own], [] if raws is None else [raws[at] for at in own], 0.0
    )
