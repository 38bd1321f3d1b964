"""A draft run: ask for draft tokens until a rule, the cap or the end of the text stops it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from sprinter.decode.accept import Exact, Judge
from sprinter.decode.budget import BUDGET_RUN, Budget, BudgetedRule
from sprinter.decode.checks import at_least
from sprinter.decode.draft import AskDraft, AskScore, AskTips, Draft, Origin, Record, Scores, Tips, Token
from sprinter.decode.drafter import one_hot_rows
from sprinter.decode.grow import Root
from sprinter.decode.lookup import Lookup, look_up
from sprinter.decode.meter import Meter
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.decode.stop import Never
from sprinter.decode.switch import DraftSwitch, RoundCount
from sprinter.decode.text_rules import TextRules
from sprinter.decode.tree import Tree
from sprinter.errors import UserError
from sprinter.random import Draws, Purpose

__all__ = [
    "COPIES",
    "METER_CHUNK",
    "Answer",
    "Asking",
    "Limits",
    "LoopRequest",
    "Row",
    "closing_pass",
    "copy_run",
    "draft_run",
    "draft_tree",
]

METER_CHUNK = 64  # a complete meter asks for a closing forward pass at this number of unscored tokens
GUARDED_RUN = 8  # maximum number of tokens in a run that is judged exactly, if the method names none
COPIES = Lookup(n=4, least=3, length=7)  # of rounds that rest
_SEARCHED = 1024  # tokens in which a round that rests looks for a copy: its time is not charged
LoopRequest = AskDraft | AskTips | AskScore
Answer = Draft | Tips | Scores
Asking = Generator[LoopRequest, Answer, None]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a text ends: at exactly ``max_new_tokens``, or where ``ends(prompt and text so far)`` returns a reason.

    ``lossy(prompt and text so far)``: whether the next token may be lossy; needed by methods with ``only``.
    """

    max_new_tokens: int
    ends: Callable[[Sequence[int]], str | None] = lambda text: None
    lossy: Callable[[Sequence[int]], bool] | None = None

    def __post_init__(self) -> None:
        at_least("max_new_tokens", self.max_new_tokens, 1)


@dataclass(slots=True)
class Guard:
    """Which parts of a text are decoded exactly though the method is lossy: its head, and what ``only`` leaves out.

    Attributes:
        end: length of the text up to which it is decoded exactly.
        lossy: as in ``Limits``; None if the method has no ``only``, or is lossless.
        on: whether this round is decoded exactly.
    """

    end: int
    lossy: Callable[[Sequence[int]], bool] | None
    on: bool = False

    @classmethod
    def of(cls, method: Method, limits: Limits, prompt: int) -> Guard:
        """The guard of a text behind a prompt of so many tokens."""
        if method.budget == 0 and not replace(method, budget=None).lossless():
            return cls(prompt + limits.max_new_tokens, None)
        if method.lossless():
            return cls(prompt, None)
        if method.only is not None and limits.lossy is None:
            raise UserError(
                f"method {method.name} follows spans of a text, and here is none: leave only= out"
            )
        return cls(prompt + method.head, None if method.only is None else limits.lossy)

    def next(self, text: Sequence[int]) -> bool:
        """Whether the token after the text must be decoded exactly."""
        # Asked of every text, in the head too: a reader of spans follows the text token by token.
        exact = self.lossy is not None and not self.lossy(text)
        return exact or len(text) < self.end


@dataclass(slots=True)
class Pace:
    """Whether a round drafts.

    Attributes:
        proposes: whether any round of this text does. switch: says which; None: all do.
        drafts: whether this round does. copies: whether it copies from the text instead.
        read: tokens that the target read in this round.
    """

    proposes: bool
    switch: DraftSwitch | None
    drafts: bool = True
    copies: bool = False
    read: int = 0

    def begin_round(self, round: int) -> None:
        """Decide for a round."""
        switch, self.read = self.switch, 0
        self.drafts = self.proposes and (switch is None or switch.drafts(round))
        self.copies = self.proposes and not self.drafts and switch is not None and switch.copies(round)

    def count(self, steps: int, tree: Tree, added: int) -> None:
        """Tell the switch what the round did: so many draft steps for a draft, and tokens that it added."""
        if self.switch is not None:
            width = 1.0 if tree.parents is None else len(tree.tokens) / max(1, steps)
            self.switch.count(RoundCount(steps, max(1.0, width), self.read, added))


@dataclass(slots=True)
class Row:
    """The state of one decoding.

    Attributes:
        sequence: the text; ``sequence.tree`` has the round's untrusted tokens. end: its largest length.
        rules, guard, pace, meter: of this text, asked by the loop where they are due.
        like: an empty tensor of the form of the target's laws, after the first pass.
        drafted: tokens drafted in this round; levels of a tree. proposed: those for which no model ran.
        gate_scores: of the tokens of a chain in the tree, as in ``Token``.
        on_trial: for the first tokens of the tree that are trusted until the target has scored them (``tail_ratio``,
            ``budget``), whether the decision saw the token.
        read: for each node of a grown tree, the number that ``AskTips`` gave it, or -1.
    """

    method: Method
    limits: Limits
    draws: Draws
    record: Record
    complete: bool
    sequence: TokenSequence
    end: int
    rules: TextRules
    guard: Guard
    pace: Pace
    meter: Meter
    like: Tensor | None = None
    drafted: int = 0
    proposed: int = 0
    gate_scores: list[float | None] = field(default_factory=list)
    on_trial: list[bool] = field(default_factory=list)
    read: list[int] = field(default_factory=list)

    @classmethod
    def begin(
        cls,
        sequence: TokenSequence,
        method: Method,
        limits: Limits,
        draws: Draws,
        record: Record,
        complete: bool,
        rules: RuleState | None = None,
        switch: DraftSwitch | None = None,
    ) -> Row:
        """A row before its first round; arguments as in ``decode``."""
        # For a single token, as in the meter, lossless rules of chains or several drafts reduce to the exact rule.
        rule = method.accept.per_position or (Exact() if method.accept.lossless else None)
        record.stats.budget = method.budget
        if switch is not None:
            record.stats.switches, record.stats.copy_switches = switch.changes, switch.copy_changes
        return cls(
            method, limits, draws, record, complete, sequence, sequence.prompt + limits.max_new_tokens,
            TextRules.begin(method, sequence.prompt, rules), Guard.of(method, limits, sequence.prompt),
            Pace(method.drafter.begin(draws), switch), Meter(rule),
        )  # fmt: skip

    @property
    def budget(self) -> Budget | None:
        """The text's account, if the method has a budget and is lossy."""
        return self.rules.budget

    def score(self, start: int, scores: Scores) -> None:
        """Meter the trusted tokens that wait, given the target's laws from position ``start + 1`` on."""
        self.meter.score(start, scores)
        if self.like is None:
            self.like = scores.laws.new_empty(0, scores.laws.shape[-1])
        self.rules.score(start, scores)

    def settle(self, position: int, token: Token) -> bool:
        """Make a token final; False if it ends the text."""
        self.record.tokens.append(token)
        if self.budget is not None:
            self.budget.spent += token.distance or 0.0
            self.record.stats.spent_drift = self.budget.spent
        over, text = "length" if position + 1 == self.end else None, self.sequence.tokens
        text = text if len(text) == position + 1 else text[: position + 1]
        self.record.finish = self.limits.ends(text) or over
        return self.record.finish is None

    def copied(self, answer: Draft) -> bool:
        """Whether a proposer drafted these tokens in the draft model's place: their laws say nothing of the model."""
        return answer.proposed and self.method.drafter.uses_model

    def begin_round(self) -> None:
        """Start a round with nothing drafted."""
        self.record.stats.rounds = self.sequence.round = self.record.stats.rounds + 1
        self.sequence.tree = Tree()
        self.drafted, self.proposed, self.gate_scores, self.on_trial = 0, 0, [], []
        self.pace.begin_round(self.sequence.round)
        self.rules.begin_round(self.pace.drafts)
        self.guard.on = self.guard.next(self.sequence.tokens)

    def end_round(self, added: int, checked: int, accepted: int) -> None:
        """Let rules and switch learn from a round that added so many tokens."""
        tree = self.sequence.tree
        self.rules.learn_levels(accepted, tree.depth, self.record.finish is not None)
        if self.pace.drafts:  # rules learn neither from copies nor from rounds that rest
            self.rules.end_round(self.drafted, checked, accepted)
        self.record.rules = self.rules.state
        self.record.accept_lengths.append(added)
        self.pace.count(self.drafted - self.proposed, tree, added)

    @property
    def accept(self) -> Judge:
        """The rule that judges this round's draft."""
        if self.guard.on or self.pace.copies:
            return Exact()
        rule = self.method.accept
        return rule if self.budget is None or rule.lossless else BudgetedRule(rule, self.budget)

    @property
    def room(self) -> int:
        """Number of tokens that may still be drafted in this round."""
        method = self.method
        # If no token can be trusted, the target call draws the last token of the text.
        left = self.end - len(self.sequence) - int(method.trust.never and not method.to_horizon)
        if self.guard.on and method.cap is None and method.length is None:  # made for runs of trusted tokens
            left = min(left, GUARDED_RUN - self.drafted)
        elif self.budget is not None and method.cap is None and method.length is None:
            left = min(left, BUDGET_RUN - self.drafted)
        bounds = [bound - self.drafted for bound in (method.cap, method.length) if bound is not None]
        return min([left, *bounds])


def draft_run(row: Row) -> Asking:
    """Draft one run: trusted tokens are final at once, if no guard holds them back; others go to the tree."""
    method, sequence, text = row.method, row.sequence, row.sequence.tokens
    tokens: list[int] = []
    laws: list[Tensor] = []
    raws: list[Tensor] = []
    sequence.tree = Tree(tokens, laws, raws)
    trusting, stopped = not row.guard.on, False
    while not stopped and row.room >= 1:
        answer = yield AskDraft(sequence, row.room)
        assert isinstance(answer, Draft)
        stopped = not answer.tokens
        for i, x in enumerate(answer.tokens):
            position, row.drafted = len(text), row.drafted + 1
            row.proposed += answer.proposed
            trusted, stop = _ask_rules(row, answer, i, position)
            if stop and method.stop.discards:
                stopped = True
                break
            text.append(x)
            row.rules.wait(position, answer, i, row.copied(answer))
            ended = len(text) == row.end or row.limits.ends(text) is not None
            forced = stop or row.drafted == method.cap  # checked even if trusted, unless it ends the text
            # One rule judges a draft: no run leaves or enters a guarded part. A trusted token before its border stays
            # trusted, as whether it is one must not depend on where it leads.
            leaves = row.guard.next(text) != row.guard.on
            stopped = forced or ended or leaves
            trusting = trusting and trusted and (ended or not forced)
            # In the second case it is trusted only because it ends the text.
            saw_token = method.sees_token or (forced and len(text) < row.end)
            if trusting and method.tail_ratio is None and row.budget is None:
                sequence.final += 1
                token = Token(x, Origin.TRUSTED, sequence.round, gate_score=_gate_score(answer, i))
                if row.complete or not method.trusts_all:
                    raw_q = None if answer.raw is None else answer.raw[i]
                    row.meter.wait(position, token, answer.laws[i], saw_token, raw_q)
                row.settle(position, token)
            else:
                if trusting:
                    row.on_trial.append(saw_token)
                tokens.append(x)
                row.gate_scores.append(_gate_score(answer, i))
                laws.append(answer.laws[i])
                raws += [] if answer.raw is None else [answer.raw[i]]
            if stopped:
                break
        sequence.cut(len(text))  # tokens that were drafted beyond the stop
        if row.complete and row.meter.waiting >= METER_CHUNK:
            yield from closing_pass(row)


def copy_run(row: Row) -> None:
    """Prompt lookup in a round that rests: the tree gets what followed the text's last tokens earlier."""
    at_most, text = min(row.room, COPIES.length), row.sequence.tokens
    if row.like is None or at_most < 1:
        return
    tokens: list[int] = []
    for x in look_up(text[-_SEARCHED:], COPIES.n, COPIES.least, at_most):
        text.append(x)
        tokens.append(x)
        if row.limits.ends(text) is not None or row.guard.next(text) != row.guard.on:
            break
    laws = [*one_hot_rows(tokens, row.like.shape[-1], row.like)]
    row.sequence.tree = Tree(tokens, laws, laws if row.method.accept.needs_raw else [])


def _gate_score(answer: Draft, i: int) -> float | None:
    """The gate's score of token i of an answer, if a rule reads it."""
    scores = answer.signals.get("gate")
    return None if scores is None else float(scores[i])


@lru_cache(maxsize=1024, typed=True)
def _number(value: int) -> Tensor:
    """A number or flag as a tensor without dimensions, made once. No rule writes into it."""
    return torch.tensor(value, device="cpu")


def _ask_rules(row: Row, answer: Draft, i: int, position: int) -> tuple[bool, bool]:
    """(trusted, stop) for token i of an answer."""
    method, rules, budget = row.method, row.rules, row.budget
    if method.trust.never and method.length is not None:
        return False, row.drafted >= method.length
    signals = {name: values[i] for name, values in answer.signals.items()}
    signals |= {"drafted": _number(row.drafted), "copied": _number(row.copied(answer))}
    if "uniform" in method.needs:
        number = row.draws.uniform(row.record.stats.rounds, position, Purpose.TRUST)
        signals["uniform"] = torch.tensor(number, dtype=torch.float64)
    within = budget is not None and not method.trust.never and not row.guard.on
    wanted: bool | None = None
    if not (within and method.chooses_threshold):
        trusted, rules.trust = method.trust.trust(signals, rules.trust)
        wanted = bool(trusted)
    if within and row.copied(answer):  # checked: what a copy drifts is not predicted
        wanted = False
    elif within and budget is not None:
        wanted = budget.allows(signals, position, wanted)
    trusted = _number(bool(wanted))
    stop, rules.stop = method.stop.stop({**signals, "trusted": trusted}, rules.stop)
    if within and method.cap is None and type(method.stop) is Never:
        stop = ~trusted & ~signals["copied"]  # no other rule would end the run
    return bool(trusted), bool(stop)


def draft_tree(row: Row) -> Asking:
    """Grow a tree of untrusted tokens, until the stop rule, at the best path's tip, or the drafter ends it."""
    method, sequence, depth = row.method, row.sequence, row.room
    if method.drafter.levels is not None:
        depth = min(depth, method.drafter.levels)
    if depth < 1:
        return
    growth = method.drafter.growth(Root(row.draws, sequence.round, len(sequence), depth))
    tips, stopped = [-1], False
    while tips and not stopped:
        found = yield growth.ask(sequence, tips)
        assert isinstance(found, Tips)
        if found.ended:
            break
        if found.reached is not None:
            tips = [tips[i] for i in found.reached]
        growth.grow(row.drafted, tips, found)
        row.drafted += 1
        signals = {name: values[0] for name, values in found.signals.items()}
        if method.stop.learns:
            row.rules.levels.append(signals)
        given = {"drafted": _number(row.drafted), "trusted": _number(False)}
        stop, row.rules.stop = method.stop.stop({**signals, **given}, row.rules.stop)
        stopped = bool(stop) or row.drafted == depth
        tips = [] if stopped else growth.tips()
    if growth.tokens:
        sequence.tree, row.read = growth.finish()


def closing_pass(row: Row) -> Asking:
    """Run a target forward pass for the meter alone."""
    sequence = row.sequence
    start, end = sequence.scored, sequence.final - 1
    scores = yield AskScore(sequence, start, end, closing=True)
    assert isinstance(scores, Scores)
    row.record.stats.closing_passes += 1
    row.score(start, scores)
    sequence.scored = end
