"""A method's rules in one text: their states, and the target's verdicts on draft tokens, for those that learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sprinter.decode.budget import DriftAccount
from sprinter.decode.draft import Draft, Scores
from sprinter.decode.method import Method
from sprinter.decode.state import RuleState
from sprinter.decode.trust import State
from sprinter.laws import overlap

__all__ = ["TextRules"]


@dataclass(slots=True)
class TextRules:
    """The rules of one text, and the round's draft tokens, which wait until the target has scored them.

    A closing forward pass of the meter may score them earlier. The rules learn at the target call all the same, so that
    metering does not change texts.

    Attributes:
        trust, stop: states of the rules.
        account: of a budget, which predicts what it learns.
        needs: signals that the rules that learn read; None: no rule learns.
        levels: of a tree, the signals before each level, if the stop rule learns from them.
    """

    method: Method
    trust: State
    stop: State
    account: DriftAccount | None
    needs: frozenset[str] | None
    levels: list[dict[str, Tensor]] = field(default_factory=list)
    _waiting: list[tuple[int, Mapping[str, Tensor], Tensor]] = field(default_factory=list)
    _scored: list[tuple[Mapping[str, Tensor], Tensor]] = field(default_factory=list)
    _last: RuleState | None = None

    @classmethod
    def begin(cls, method: Method, account: DriftAccount | None, earlier: RuleState | None) -> TextRules:
        """At the beginning of a text; ``earlier``: the state of an earlier text to continue from."""
        states = RuleState.begin(method.trust, method.stop, earlier)
        return cls(method, states.trust_state, states.stop_state, account, method.learned_from)

    @property
    def state(self) -> RuleState:
        """What another text can continue from."""
        last = self._last
        if last is None or last.trust_state is not self.trust or last.stop_state is not self.stop:
            last = self._last = RuleState(self.method.trust, self.method.stop, self.trust, self.stop)
        return last

    def begin_round(self, drafts: bool) -> None:
        """A round begins; ``drafts``: whether it drafts."""
        self.levels = []
        if drafts:
            self.stop = self.method.stop.begin_round(self.stop)
        if self.account is not None:
            self.account.begin_run()

    def wait(self, position: int, answer: Draft, i: int, copied: bool) -> None:
        """Token i of an answer stands at a position of the text, and waits for its verdict, if a rule learns.

        Args:
            copied: it says nothing of the draft model; without a budget trust rules judge copies too, and must see what
                becomes of them.
        """
        if self.needs is None or (copied and (self.account is not None or not self.method.trust.learns)):
            return
        signals = {name: answer.signals[name][i] for name in self.needs & answer.signals.keys()}
        self._waiting.append((position, signals, answer.laws[i]))

    def score(self, start: int, scores: Scores) -> None:
        """Take β at the waiting positions: row i of the scores is the law at position ``start + i + 1``."""
        if not self._waiting:
            return
        rows = [position - start - 1 for position, *_ in self._waiting]
        count = sum(row < len(scores.laws) for row in rows)
        if count:
            q = torch.stack([law for *_, law in self._waiting[:count]])
            found = overlap(scores.at(rows[:count]), q).cpu()
            self._scored += [
                (signals, beta) for (_, signals, _), beta in zip(self._waiting[:count], found, strict=True)
            ]
            del self._waiting[:count]

    def forget(self, length: int) -> None:
        """The text was cut to ``length`` tokens."""
        self._waiting = [one for one in self._waiting if one[0] < length]

    def learn(self) -> None:
        """Pass the target's verdicts since the last call to the rules that learn."""
        if not self._scored:
            return
        method, each = self.method, [one for one, _ in self._scored]
        signals = {name: torch.stack([one[name] for one in each]) for name in each[0]}
        overlaps = torch.stack([beta for _, beta in self._scored])
        self._scored.clear()
        if method.trust.learns:
            self.trust = method.trust.learn(signals, overlaps, self.trust)
        if method.stop.learns:
            self.stop = method.stop.learn(signals, overlaps, self.stop)
        if self.account is not None and method.predicts:
            self.account.learn(signals, overlaps)

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
