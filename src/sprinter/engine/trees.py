"""Draft steps of trees that grow: one forward pass over the newest tips, and the draft model's laws after each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjust
from sprinter.decode.draft import Ranked
from sprinter.decode.grow import ranked
from sprinter.decode.signals import SIGNALS, read_signals
from sprinter.engine.rows import CacheRows, RowInput
from sprinter.errors import SprinterError
from sprinter.laws import Sampling, process, raw_law

__all__ = ["TipLaws", "TreeRow", "TreeSteps"]


@dataclass(slots=True)
class TreeRow:
    """One row of a draft step of a tree.

    Attributes:
        feed: the text's unread tokens, or the tips.
        count: number of tips, the last tokens of the feed.
        sampling: of the processed laws. laws, top: as in ``AskTips``. raw: whether to return raw laws.
        signals: names of ``sprinter.decode.signals.SIGNALS`` that the stop rule reads.
        adjust: adjusts the logits after the tips.
    """

    feed: RowInput
    count: int
    sampling: Sampling
    laws: bool = False
    top: int = 0
    raw: bool = False
    signals: Sequence[str] = ()
    adjust: Adjust | None = None


@dataclass(slots=True)
class TipLaws:
    """What ``TreeRow`` asks for, at each tip: laws and raw laws ``[tips, V]``, the most probable tokens, signals.

    ``draft_s``: the row's time in seconds.
    """

    laws: Tensor | None
    raws: Tensor | None
    top: list[Ranked]
    signals: dict[str, Tensor]
    draft_s: float


class TreeSteps:
    """Draft steps of trees for some rows, each at most once, on any runner that supports trees.

    The forward pass is captured if the runner captures trees; laws are computed eagerly.
    """

    def __init__(self, rows: CacheRows) -> None:
        self._rows = rows

    def __call__(self, rows: Sequence[TreeRow]) -> list[TipLaws | SprinterError]:
        """Return, for each row in order, its laws or its error; an error does not affect other rows."""
        began = time.perf_counter()
        with torch.inference_mode():
            result = self._rows.read([row.feed for row in rows])
            read: list[TipLaws | SprinterError] = [
                result.faults.get(i) or _laws(row, result.logits[i]) for i, row in enumerate(rows)
            ]
        seconds = (time.perf_counter() - began) / len(rows)
        for one in read:
            if isinstance(one, TipLaws):
                one.draft_s = seconds
        return read


def _laws(row: TreeRow, logits: Tensor) -> TipLaws:
    """The laws at the tips; ``logits [n, V]`` after the tokens of the feed."""
    end = len(row.feed.tokens)
    own = logits[end - row.count : end]
    adjusted = own if row.adjust is None else row.adjust(own)
    signals = [SIGNALS[name] for name in row.signals]
    laws = process(adjusted, row.sampling) if row.laws or any(one.reads("law") for one in signals) else None
    raws = raw_law(own) if row.raw or any(one.reads("raw") for one in signals) else None
    values: dict[str, Tensor] = {}
    if signals:
        law, raw = laws if laws is not None else raws, raws if raws is not None else laws
        assert law is not None
        assert raw is not None
        read = read_signals(row.signals, law, raw)
        values = {name: each.to("cpu", torch.float64) for name, each in read.items()}
    top = ranked(adjusted.float().log_softmax(-1), row.top) if row.top else []
    return TipLaws(laws if row.laws else None, raws if row.raw else None, top, values, 0.0)
