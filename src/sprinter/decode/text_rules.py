"""A method's rules in one text: their states, what they have learned, and the account of a budget."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.budget import Budget
from sprinter.decode.draft import Draft, Scores
from sprinter.decode.method import Method
from sprinter.decode.state import RuleState
from sprinter.decode.trust import State
from sprinter.decode.verdicts import Verdicts

__all__ = ["TextRules"]


@dataclass(slots=True)
class TextRules:
    """The rules of one text.

    Attributes:
        trust, stop: states of the rules.
        budget: the text's account, if the method has a budget and is lossy.
        verdicts: the round's draft tokens, for rules that learn.
        levels: of a tree, the signals before each level, if the stop rule learns from them.
    """

    method: Method
    trust: State
    stop: State
    budget: Budget | None
    verdicts: Verdicts
    levels: list[dict[str, Tensor]] = field(default_factory=list)

    @classmethod
    def begin(cls, method: Method, prompt: int, earlier: RuleState | None) -> TextRules:
        """At the beginning of a text.

        Args:
            prompt: its length in tokens. earlier: the state of an earlier text to continue from.
        """
        states = RuleState.begin(method.trust, method.stop, earlier)
        budget = (
            Budget(method.budget, method.predicts, prompt)
            if method.budget and not method.lossless()
            else None
        )
        return cls(method, states.trust_state, states.stop_state, budget, Verdicts(method.learned_from))

    @property
    def state(self) -> RuleState:
        """What another text can continue from."""
        return RuleState(self.method.trust, self.method.stop, self.trust, self.stop)

    def begin_round(self, drafts: bool) -> None:
        """A round begins; ``drafts``: whether it drafts."""
        self.levels = []
        if drafts:
            self.stop = self.method.stop.begin_round(self.stop)
        if self.budget is not None:
            self.budget.begin_run()

    def wait(self, position: int, answer: Draft, i: int, copied: bool) -> None:
        """Token i of an answer stands at a position of the text, and waits for its verdict.

        Args:
            copied: it says nothing of the draft model; without a budget trust rules judge copies too, and must see what
                becomes of them.
        """
        if not copied or (self.method.trust.learns and self.budget is None):
            self.verdicts.wait(position, answer, i)

    def score(self, start: int, scores: Scores) -> None:
        """The target's laws from position ``start + 1`` on are known."""
        self.verdicts.score(start, scores)

    def learn(self) -> None:
        """Pass the target's verdicts since the last call to the rules that learn."""
        method, taken = self.method, self.verdicts.take()
        if taken is None:
            return
        if method.trust.learns:
            self.trust = method.trust.learn(*taken, self.trust)
        if method.stop.learns:
            self.stop = method.stop.learn(*taken, self.stop)
        if self.budget is not None and method.predicts:
            self.budget.learn(*taken)

    def learn_levels(self, accepted: int, depth: int, over: bool) -> None:
        """Pass on which levels of a tree that were reached had a token that the target accepted.

        Args:
            depth: of the tree that was judged; levels that a reranked tree has lost were not.
            over: whether the text has ended; levels behind its end were not judged either.
        """
        reached = self.levels[: min(accepted + (not over), depth)]
        if reached:
            signals = {name: torch.stack([one[name] for one in reached]) for name in reached[0]}
            verdicts = (torch.arange(len(reached)) < accepted).double()
            self.stop = self.method.stop.learn(signals, verdicts, self.stop)

    def end_round(self, drafted: int, checked: int, accepted: int) -> None:
        """A round that drafted ends; see ``StopRule.end_round``."""
        self.stop = self.method.stop.end_round(self.stop, drafted, checked, accepted)
