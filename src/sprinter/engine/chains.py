"""Drafts of a request behind which the target's verdict follows in any case: both can be launched together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from sprinter.decode.accept.rows import judged_in_rows
from sprinter.decode.draft import AskDraft, AskScore
from sprinter.decode.run_rules import RunRules
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method
from sprinter.engine.backends.base import ChainRow, Drafted, DraftedChain, DraftRow, RowInput, Scored
from sprinter.laws import Sampling
from sprinter.random import AddressedDraws, Draws, PositionDraws

__all__ = ["Chains"]


@dataclass(slots=True)
class Chains:
    """Of one request, what the target will be asked behind its drafts, and what it has said.

    Attributes:
        raw: whether raw laws are wanted.
        trusts: whether tokens may be trusted.
    """

    sequence: TokenSequence
    sampling: Sampling
    raw: bool
    trusts: bool
    draws: Draws
    _known: tuple[RowInput, Scored] | None = None
    _drafted: int = 0
    # of the draft run: how it is judged, its round, position, and laws
    _rule: str | None = None
    _round: int = 0
    _start: int = 0
    _laws: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls, sequence: TokenSequence, method: Method, sampling: Sampling, raw: bool, draws: Draws
    ) -> Chains | None:
        """None: what the target is asked of this request is never known before its draft is."""
        trusts, kinds = not method.trust.never, (AddressedDraws, PositionDraws)
        later = method.budget is not None or method.tail_ratio is not None or method.sees_token
        fits = not (method.stop.discards or (trusts and later)) and type(draws) in kinds
        return cls(sequence, sampling, raw, trusts, draws) if fits else None

    def row(self, ask: AskDraft, count: int, rules: RunRules | None) -> ChainRow | None:
        """What the target will be asked behind a draft of at most ``count`` tokens; None: that is not known, or it is
        not asked for the verdict of an exact rule on this chain alone.

        Args:
            rules: that end the draft on the device.
        """
        run, sequence, view = ask.run, self.sequence, self.sequence.target
        longest = ask.at_most if ask.ahead is None else min(ask.ahead, ask.at_most)
        guarded = run is None or run.forced or run.guard is not None
        rule = self._rule = None if run is None or guarded else judged_in_rows(run.accept)
        if run is None or count < longest or sequence.tree.tokens:
            return None
        if self.trusts and (rules is None or longest >= run.left):  # a trusted token may end the text
            return None
        if rule is None or not view.begun or view.read < sequence.prompt - 1 or view.nodes:
            return None
        unread = view.unread(sequence.tokens, len(sequence))
        return ChainRow(RowInput(view.row, view.read, unread), self.sampling, self.raw, rule, self.trusts)

    def keep(self, given: DraftRow, done: Drafted) -> None:
        """Keep what the target said, until it is asked."""
        self._known = None
        if given.round != self._round or given.position != self._start + sum(map(len, self._laws)):
            self._round, self._start, self._laws = given.round, given.position, []
        self._laws.append(done.laws)
        if given.chain is not None and done.scored is not None:
            feed = given.chain.feed
            self._known = feed._replace(tokens=[*feed.tokens, *done.tokens]), done.scored
            self._drafted = len(done.tokens)

    def drafted(self, ask: AskScore) -> DraftedChain | None:
        """The draft of the draft model that the target is asked to judge; None: it is another, or the loop must."""
        sequence, first, rule = self.sequence, self._start, self._rule
        n, tree = ask.end - first, sequence.tree
        if rule is None or ask.closing or not tree.tokens or tree.parents is not None:
            return None
        if self._round != sequence.round or not ask.start < first <= sequence.final:
            return None
        if n > sum(map(len, self._laws)):
            return None
        laws, left = list[Tensor](), n
        for part in self._laws:
            laws.append(part[:left])
            left -= len(laws[-1])
        tokens, trusted = sequence.tokens[first : ask.end], sequence.final - first
        return DraftedChain(rule, tokens, laws, first, trusted, self.draws, sequence.round)

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
        accepted, token, trusted = scored.accepted, scored.token, scored.trusted
        judged = feed.start + len(feed.tokens) - self._drafted + trusted  # where the first judged token is
        short = left > 0 and accepted is not None and trusted + accepted >= self._drafted - left
        if judged != self.sequence.final or short:  # what follows was not drawn: the loop does that
            accepted = token = None
        laws, raw = scored.laws, None if scored.raw is None else scored.raw[:n]
        assert isinstance(laws, Tensor)
        return replace(scored, laws=laws[:n], raw=raw, accepted=accepted, token=token)
