"""Token recycling: drafts what the target held most probable after each token, the last time that it read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sprinter.decode.checks import count, number
from sprinter.decode.copies import FREE, LONGEST_COPY, NO_COPY, Copier, Copies, Copy, Worth
from sprinter.decode.costs import MEASURED, STEP
from sprinter.decode.drafter import NOTHING, Context, Drafter
from sprinter.decode.registry import DRAFTER

__all__ = ["Recycle"]


@DRAFTER.rule("recycle")
@dataclass(frozen=True)
class Recycle(Copies):
    """Token recycling (Luo et al. 2024), as a chain: from the text's last token to its most probable successor under
    the target's latest law after that token, and on from there.

    The laws are those of the passes that judge drafts, of refused tokens too, so no model runs for a draft. The law of
    a token is one-hot.

    Args:
        otherwise, length, reads, step: as for ``Copies``.
    """

    otherwise: Drafter = NOTHING
    length: int = count(4, 1, LONGEST_COPY)
    reads: str = FREE
    step: float | str = number(STEP, 0.0, 100.0, MEASURED)
    recycles: ClassVar[bool] = True
    reads_earlier: ClassVar[bool] = True

    def copier(self) -> Copier:
        """What walks from token to token."""
        return _RecycleCopier(self)


class _RecycleCopier(Copier):
    def __init__(self, drafter: Recycle) -> None:
        self._drafter, self._worth = drafter, Worth.of(drafter)

    def plan(self, context: Context) -> Copy:
        text, worth, known = context.text, self._worth, context.successors
        if worth is not None:
            worth.learn(text)
        found = [] if known is None else known.walk(text[-1], self._drafter.length)
        if not found:
            return NO_COPY
        if worth is None:
            return Copy(found)
        length, gain = worth.paying(1, len(found))
        worth.copied = (len(text), found[:length], 1)
        return Copy(found[:length], None, gain)
