"""Drafts of a request behind which the target's verdict follows in any case: both can be launched together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sprinter.decode.accept.rows import judged_in_rows
from sprinter.decode.draft import AskDraft, AskScore
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method
from sprinter.engine.backends.base import ChainRow, Drafted, DraftRow, RowInput, Scored
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws, Draws, PositionDraws

__all__ = ["Chains"]


@dataclass(slots=True)
class Chains:
    """Of one request, what the target will be asked behind its drafts, and what it has said.

    Attributes:
        raw: whether raw laws are wanted.
    """

    sequence: TokenSequence
    sampling: Sampling
    raw: bool
    _known: tuple[RowInput, Scored] | None = None
    _drafted: int = 0

    @classmethod
    def of(
        cls, sequence: TokenSequence, method: Method, sampling: Sampling, raw: bool, draws: Draws
    ) -> Chains | None:
        """None: what the target is asked of this request is never known before its draft is."""
        fits = (
            method.trust.never and not method.stop.discards and type(draws) in (AddressedDraws, PositionDraws)
        )
        return cls(sequence, sampling, raw) if fits else None

    def row(self, ask: AskDraft, count: int) -> ChainRow | None:
        """What the target will be asked behind a draft of at most ``count`` tokens; None: that is not known, or it is
        not asked for the verdict of an exact rule on this chain alone."""
        run, sequence, view = ask.run, self.sequence, self.sequence.target
        longest = ask.at_most if ask.ahead is None else min(ask.ahead, ask.at_most)
        if run is None or count < longest or run.drafted or run.forced or run.guard is not None:
            return None
        rule = judged_in_rows(run.accept)
        if rule is None or not view.begun or view.read < sequence.prompt - 1 or view.nodes:
            return None
        unread = view.unread(sequence.tokens, len(sequence))
        return ChainRow(RowInput(view.row, view.read, unread), self.sampling, self.raw, rule)

    def keep(self, given: DraftRow, done: Drafted) -> None:
        """Keep what the target said, until it is asked."""
        self._known = None
        if given.chain is not None and done.scored is not None:
            feed = given.chain.feed
            self._known = feed._replace(tokens=[*feed.tokens, *done.tokens]), done.scored
            self._drafted = len(done.tokens)

    def known(self, ask: AskScore) -> Scored | None:
        """What the target said, if it is asked for that, or for the verdict on the beginning of that draft."""
        known, self._known = self._known, None
        if known is None or ask.closing or ask.nodes:
            return None
        feed, scored = known
        text = self.sequence.tokens[ask.start : ask.end]
        n, left = len(text), len(feed.tokens) - len(text)
        if feed.start != ask.start or text != feed.tokens[:n] or left >= self._drafted:
            return None
        accepted, token = scored.accepted, scored.token
        if accepted is not None and left and accepted >= self._drafted - left:
            accepted = token = None  # what follows the last token was not drawn: the loop does that
        laws, raw = scored.laws, None if scored.raw is None else scored.raw[:n]
        assert isinstance(laws, Tensor)
        return replace(scored, laws=laws[:n], raw=raw, accepted=accepted, token=token)
