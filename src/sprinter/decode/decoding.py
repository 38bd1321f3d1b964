"""The state of one decoding, and its draft runs: ask for draft tokens until a rule, the cap or the text's end stops."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from sprinter.decode.accept import Exact, Judge, TargetCall, Verdict
from sprinter.decode.budget import BUDGET_RUN, BudgetedRule, DriftAccount
from sprinter.decode.checks import at_least
from sprinter.decode.draft import (
    AskDraft,
    AskGrammar,
    AskScore,
    AskTips,
    Draft,
    Origin,
    Record,
    Scores,
    Tips,
    Token,
)  # fmt: skip
from sprinter.decode.drafter import one_hot_rows
from sprinter.decode.grammar import Grammar
from sprinter.decode.grow import Root
from sprinter.decode.lookup import Endings
from sprinter.decode.meter import Meter
from sprinter.decode.review import review
from sprinter.decode.sequence import NO_DRAFT, TokenSequence, Tree
from sprinter.decode.spec import Method
from sprinter.decode.state import RuleState
from sprinter.decode.stop import Never, StopRule
from sprinter.decode.successors import Successors
from sprinter.decode.switch import DraftSwitch, RoundCount
from sprinter.decode.text_rules import TextRules
from sprinter.errors import UserError
from sprinter.random import Draws, Purpose

__all__ = [
    "METER_CHUNK", "Answer", "Asking", "Decoding", "Limits", "LoopRequest", "closing_pass",
    "draft_run", "draft_tree",
]  # fmt: skip

METER_CHUNK = 64  # a complete meter asks for a closing forward pass at this number of unscored tokens
GUARDED_RUN = 8  # maximum number of tokens in a run that is judged exactly, if the method names none
FORCED = 32  # maximum number of tokens in a round that a grammar forces
LoopRequest = AskDraft | AskTips | AskGrammar | AskScore
Answer = Draft | Tips | Scores | Sequence[int]
Asking = Generator[LoopRequest, Answer, None]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a text ends: at exactly ``max_new_tokens``, or where ``reason`` finds one.

    Attributes:
        ends: of the prompt and text so far, the reason why it ends here, or None.
        lossy: of the same, whether the next token may be lossy; needed by methods with ``only``.
        last: reasons by the token that ends a text.
        grammar: of the text, which both models' laws follow: what it forces is drafted without a model.
        like: an empty tensor ``[0, V]`` of the form of laws, for drafts before the first target call.
    """

    max_new_tokens: int
    ends: Callable[[Sequence[int]], str | None] | None = None
    lossy: Callable[[Sequence[int]], bool] | None = None
    last: Mapping[int, str] = field(default_factory=dict)
    grammar: Grammar | None = None
    like: Tensor | None = None

    def __post_init__(self) -> None:
        at_least("max_new_tokens", self.max_new_tokens, 1)

    def reason(self, text: Sequence[int]) -> str | None:
        """Why the text ends after its last token; None: it goes on."""
        found = self.last.get(text[-1])
        return self.ends(text) if found is None and self.ends is not None else found


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
    def of(cls, method: Method, limits: Limits, prompt: int) -> Guard | None:
        """The guard of a text behind a prompt of so many tokens; None: it needs none."""
        if method.budget == 0 and not replace(method, budget=None).lossless():
            return cls(prompt + limits.max_new_tokens, None)
        if method.lossless() or not (method.head or method.only):
            return None
        if method.only is not None and limits.lossy is None:
            raise UserError(
                f"method {method.name} follows spans of a text, and here is none: leave only= out"
            )
        return cls(prompt + method.head, limits.lossy if method.only else None)

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
        exact: whether it is judged exactly because no rule of the method drafted it.
        endings: of the text, where such rounds look for copies.
    """

    proposes: bool
    switch: DraftSwitch | None
    drafts: bool = True
    copies: bool = False
    exact: bool = False
    endings: Endings | None = None

    def begin_round(self, round: int, left: int) -> None:
        """Decide for a round; ``left``: tokens that may still be drafted."""
        self.exact = False
        switch, self.drafts = self.switch, self.proposes
        if switch is not None:
            self.drafts = self.proposes and switch.drafts(round, left)
            self.copies = self.proposes and not self.drafts and switch.copies(round)


@dataclass(slots=True)
class Decoding:
    """The state of one decoding.

    Attributes:
        sequence: the text; ``sequence.tree`` has the round's untrusted tokens. end: its largest length.
        rules, pace, meter: of this text, asked by the loop where they are due. guard: None: no part of it has one.
        rule: judges drafts; what the method's has become by ``Judge.after``.
        asks: whether rules are asked: not where runs have a fixed length, and no token can be trusted.
        account: of the drift that the text spends, if the method has a budget and is lossy.
        blind: whether no token can be trusted. length: of each draft run, if it is fixed. longest: at most.
        by_model: whether the draft model or heads draft: proposals in their place are copies.
        provisional: whether trusted tokens are final only when the target has scored them.
        paced: whether the stop rule may know the length of a run when it begins.
        like: an empty tensor of the form of the target's laws; None: not known before the first pass.
        drafted: tokens drafted in this round; levels of a tree. proposed: those for which no model ran.
        forced: further tokens, which the grammar forces: rules are not asked about them.
        gate_scores: of the tokens of a chain in the tree, as in ``Token``.
        on_trial: for the first tokens of the tree that are trusted until the target has scored them, whether the
            decision saw the token.
        draft_nodes: for each node of a grown tree, the number that ``AskTips`` gave it, or -1.
    """

    method: Method
    limits: Limits
    draws: Draws
    record: Record
    complete: bool
    sequence: TokenSequence
    end: int
    rules: TextRules
    rule: Judge
    asks: bool
    guard: Guard | None
    pace: Pace
    meter: Meter
    account: DriftAccount | None
    blind: bool
    length: int | None
    longest: int | None
    by_model: bool
    provisional: bool
    paced: bool
    like: Tensor | None = None
    drafted: int = 0
    proposed: int = 0
    forced: int = 0
    gate_scores: list[float | None] = field(default_factory=list)
    on_trial: list[bool] = field(default_factory=list)
    draft_nodes: list[int] = field(default_factory=list)

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
    ) -> Decoding:
        """A decoding before its first round; arguments as in ``decode``."""
        # For a single token, as in the meter, lossless rules of chains or several drafts reduce to the exact rule.
        rule = method.accept.per_position or (Exact() if method.accept.lossless else None)
        record.stats.budget = method.budget
        if switch is not None:
            record.stats.switches, record.stats.copy_switches = switch.changes, switch.copy_changes
        if method.drafter.recycles and sequence.successors is None:
            sequence.successors = Successors()
        account, proposes = DriftAccount.of(method, sequence.prompt), method.drafter.begin(draws)
        end = sequence.prompt + limits.max_new_tokens
        bounds = [bound for bound in (method.cap, method.length) if bound is not None]
        asks = bool(account or method.learned_from or not method.trust.never or method.length is None)
        return cls(
            method, limits, draws, record, complete, sequence, end, TextRules.begin(method, account, rules),
            method.accept, asks, Guard.of(method, limits, sequence.prompt), Pace(proposes, switch, proposes),
            Meter(rule), account, method.trust.never, method.length, min(bounds, default=None),
            method.drafter.uses_model or method.drafter.by_heads,
            method.tail_ratio is not None or account is not None,
            method.trust.never and type(method.stop).ahead is not StopRule.ahead, limits.like,
        )  # fmt: skip

    def score(self, start: int, scores: Scores) -> None:
        """Meter the trusted tokens that wait, given the target's laws from position ``start + 1`` on."""
        if self.meter.waiting:
            self.meter.score(start, scores)
        if self.like is None or self.like is self.limits.like:
            self.like = scores.laws.new_empty(0, scores.laws.shape[-1])
        if self.asks:
            self.rules.score(start, scores)

    def shorten(self, length: int) -> None:
        """The target has scored ``tokens[:length]`` alone: forget the rest of a chain."""
        sequence, tree = self.sequence, self.sequence.tree
        if (lost := len(sequence) - length) <= 0:
            return
        assert length >= sequence.final, "tokens that are final were not scored"
        n = length - sequence.final
        sequence.tree = Tree(tree.tokens[:n], tree.laws[:n], tree.raws[:n])
        del self.on_trial[n:], self.gate_scores[n:]
        self.drafted = max(0, self.drafted - lost)
        self.rules.forget(length)
        sequence.cut(length)

    def settle(self, position: int, token: Token) -> bool:
        """Make a token final; False if it ends the text."""
        self.record.tokens.append(token)
        if self.account is not None:
            self.account.spent += token.distance or 0.0
            self.record.stats.spent_drift = self.account.spent
        text = self.sequence.tokens
        reason = self.limits.reason(text if len(text) == position + 1 else text[: position + 1])
        self.record.finish = reason or ("length" if position + 1 == self.end else None)
        return self.record.finish is None

    def begin_round(self) -> None:
        """Start a round with nothing drafted."""
        sequence = self.sequence
        self.record.stats.rounds = sequence.round = self.record.stats.rounds + 1
        sequence.tree = NO_DRAFT
        if self.pace.proposes or self.pace.switch is not None:
            self.pace.begin_round(sequence.round, self.left)
        if self.pace.proposes:
            self.drafted, self.proposed, self.forced, self.gate_scores, self.on_trial = 0, 0, 0, [], []
            if self.asks:
                self.rules.begin_round(self.pace.drafts)
        if self.guard is not None:
            self.guard.on = self.guard.next(sequence.tokens)

    def end_round(self, added: int, target_tokens: int, checked: int, accepted: int) -> None:
        """Let rules and switch learn from a round that added so many tokens, for which the target read so many."""
        tree, pace, rules = self.sequence.tree, self.pace, self.rules
        if self.asks:
            if rules.levels:
                rules.learn_levels(accepted, tree.depth, self.record.finish is not None)
            if pace.drafts and not pace.exact:  # rules learn neither from copies nor from rounds that rest
                rules.end_round(self.drafted, checked, accepted)
        if self.asks or self.record.rules is None:
            self.record.rules = rules.state
        self.record.accept_lengths.append(added)
        if pace.switch is not None:
            steps = self.drafted - self.proposed
            width = 1.0 if tree.parents is None else len(tree.tokens) / max(1, steps)
            if (each := self.method.drafter.tokens_a_pass) > 1:
                steps, width = -(-steps // each), float(min(steps, each))
            pace.switch.count(RoundCount(steps, max(1.0, width), target_tokens, added))

    def judge(self, call: TargetCall) -> Verdict:
        """Judge the round's draft."""
        rule, method, trusted = self.accept, self.method, self.on_trial
        # Exact rules differ in what becomes of a token: if trust depends on tokens, two of them together are not exact.
        if not trusted or (method.tail_ratio == 1 and rule.lossless):
            verdict = rule.judge(call)
        else:
            verdict = review(method.tail_ratio or 0.0, trusted, rule, self.meter.rule, call, self.account)
        if not (self.guarded or self.pace.exact):
            self.rule = self.rule.after(call, verdict)
        return verdict

    @property
    def guarded(self) -> bool:
        """Whether this round is decoded exactly though the method is lossy."""
        return self.guard is not None and self.guard.on

    def leaves(self, text: Sequence[int]) -> bool:
        """Whether the token after the text is in another part, guarded or not, than this round."""
        return self.guard is not None and self.guard.next(text) != self.guard.on

    @property
    def accept(self) -> Judge:
        """The rule that judges this round's draft."""
        if self.guarded or self.pace.exact:
            return Exact()
        rule = self.rule
        return rule if self.account is None or rule.lossless else BudgetedRule(rule, self.account)

    @property
    def left(self) -> int:
        """Number of tokens that a draft may still have up to the end of the text."""
        # If no token can be trusted, the target call draws the last token of the text.
        return self.end - len(self.sequence.tokens) - (self.blind and not self.method.to_horizon)

    @property
    def room(self) -> int:
        """Number of tokens that may still be drafted in this round."""
        left, longest = self.left, self.longest
        if longest is None and (self.guarded or self.account is not None):  # made for runs of trusted tokens
            longest = GUARDED_RUN if self.guarded else BUDGET_RUN
        return left if longest is None else min(left, longest - self.drafted)

    @property
    def ahead(self) -> int | None:
        """Number of tokens that the draft model will still write in this run in any case; None: not known."""
        known = self.method.stop.ahead(self.rules.stop) if self.paced else None
        return known and max(1, known - (self.drafted - self.proposed))

    def force(self) -> Generator[LoopRequest, Answer, Draft | None]:
        """Ask for the tokens that must follow the text, as a draft; None: there are none."""
        grammar, like, text = self.limits.grammar, self.like, self.sequence.tokens
        if grammar is None or like is None or not self.pace.proposes:
            return None
        found = yield AskGrammar(self.sequence, grammar.forced(text[self.sequence.prompt :]))
        assert not isinstance(found, Draft | Tips | Scores)
        tokens = tuple(found)[: min(self.left, FORCED - self.forced)]
        laws = one_hot_rows(tokens, like.shape[-1], like)
        raw = laws if self.method.accept.needs_raw else None
        return Draft(tokens, laws, {}, raw, proposed=True) if tokens else None


def draft_run(decoding: Decoding) -> Asking:
    """Draft one run: trusted tokens are final at once, if no guard holds them back; others go to the tree."""
    method, sequence, text = decoding.method, decoding.sequence, decoding.sequence.tokens
    tokens: list[int] = []
    laws: list[Tensor] = []
    raws: list[Tensor] = []
    sequence.tree = Tree(tokens, laws, raws)
    trusting, stopped = not decoding.guarded, False
    while not stopped and (room := decoding.room) >= 1:
        # Where trusted tokens wait for the target, an untrusted one would end them.
        must = None if trusting and decoding.provisional else (yield from decoding.force())
        if must is None:
            answer = yield AskDraft(sequence, room, decoding.ahead, decoding)
        else:
            answer = must
        assert isinstance(answer, Draft)
        stopped, copied = not answer.tokens, answer.proposed and decoding.by_model
        for i, x in enumerate(answer.tokens):
            position = len(text)
            if must is not None:
                trusted, stop = not decoding.blind, False
                decoding.forced += 1
            else:
                decoding.drafted += 1
                decoding.proposed += answer.proposed
                trusted, stop = _ask_rules(decoding, answer, i, position, copied)
            if stop and method.stop.discards:
                stopped = True
                break
            text.append(x)
            if decoding.asks and must is None:
                decoding.rules.wait(position, answer, i, copied)
            ended = len(text) == decoding.end or decoding.limits.reason(text) is not None
            forced = (
                stop or decoding.drafted == method.cap
            )  # checked even if trusted, unless it ends the text
            # One rule judges a draft: no run leaves or enters a guarded part. A trusted token before its border stays
            # trusted, as whether it is one must not depend on where it leads.
            stopped = decoding.leaves(text) or forced or ended
            trusting = trusting and trusted and (ended or not forced)
            gate = answer.signals.get("gate")
            score = None if gate is None else float(gate[i])
            if trusting:
                # In the second case it is trusted only because it ends the text.
                saw_token = method.sees_token or (forced and len(text) < decoding.end)
            if trusting and not decoding.provisional:
                sequence.final += 1
                token = Token(x, Origin.TRUSTED, sequence.round, gate_score=score)
                if decoding.complete or not method.trusts_all:
                    raw_q = None if answer.raw is None else answer.raw[i]
                    decoding.meter.wait(position, token, answer.laws[i], saw_token, raw_q)
                decoding.settle(position, token)
            else:
                if trusting:
                    decoding.on_trial.append(saw_token)
                tokens.append(x)
                decoding.gate_scores.append(score)
                laws.append(answer.laws[i])
                raws += [] if answer.raw is None else [answer.raw[i]]
            if stopped:
                break
        sequence.cut(len(text))  # tokens that were drafted beyond the stop
        if decoding.complete and len(decoding.meter.waiting) >= METER_CHUNK:
            yield from closing_pass(decoding)


@lru_cache(maxsize=1024, typed=True)
def _number(value: int) -> Tensor:
    """A number or flag as a tensor without dimensions, made once. No rule writes into it."""
    return torch.tensor(value, device="cpu")


def _ask_rules(decoding: Decoding, answer: Draft, i: int, position: int, copied: bool) -> tuple[bool, bool]:
    """(trusted, stop) for token i of an answer; ``copied``: a proposer drafted it in the draft model's place."""
    method, rules, account = decoding.method, decoding.rules, decoding.account
    if decoding.blind and decoding.length is not None:
        return False, decoding.drafted >= decoding.length
    if decoding.paced and not copied and (known := method.stop.ahead(rules.stop)) is not None:
        return False, decoding.drafted - decoding.proposed >= known
    signals = {name: values[i] for name, values in answer.signals.items()}
    signals |= {"drafted": _number(decoding.drafted), "copied": _number(copied)}
    if "uniform" in method.needs:
        number = decoding.draws.uniform(decoding.record.stats.rounds, position, Purpose.TRUST)
        signals["uniform"] = torch.tensor(number, dtype=torch.float64)
    spends = account is not None and not decoding.blind and not decoding.guarded
    wanted: bool | None = None
    if not (spends and method.chooses_threshold):
        decision, rules.trust = method.trust.trust(signals, rules.trust)
        wanted = bool(decision)
    if spends and copied:  # checked: what a copy drifts is not predicted
        wanted = False
    elif spends and account is not None:
        wanted = account.allows(signals, position, wanted)
    trusted = _number(bool(wanted))
    stop, rules.stop = method.stop.stop({**signals, "trusted": trusted}, rules.stop)
    if spends and method.cap is None and type(method.stop) is Never:
        stop = ~trusted & ~signals["copied"]  # no other rule would end the run
    return bool(trusted), bool(stop)


def draft_tree(decoding: Decoding) -> Asking:
    """Grow a tree of untrusted tokens, until the stop rule, at the best path's tip, or the drafter ends it."""
    method, sequence, depth = decoding.method, decoding.sequence, decoding.room
    if method.drafter.levels is not None:
        depth = min(depth, method.drafter.levels)
    if depth < 1:
        return
    growth = method.drafter.growth(Root(decoding.draws, sequence.round, len(sequence), depth))
    tips, stopped = [-1], False
    while tips and not stopped:
        found = yield growth.ask(sequence, tips)
        assert isinstance(found, Tips)
        if found.ended:
            break
        if found.reached is not None:
            tips = [tips[i] for i in found.reached]
        growth.grow(decoding.drafted, tips, found)
        decoding.drafted += 1
        signals = {name: values[0] for name, values in found.signals.items()}
        if method.stop.learns:
            decoding.rules.levels.append(signals)
        given = {"drafted": _number(decoding.drafted), "trusted": _number(False)}
        stop, decoding.rules.stop = method.stop.stop({**signals, **given}, decoding.rules.stop)
        stopped = bool(stop) or decoding.drafted == depth
        tips = [] if stopped else growth.tips()
    if growth.tokens:
        sequence.tree, decoding.draft_nodes = growth.finish()


def closing_pass(decoding: Decoding) -> Asking:
    """Run a target forward pass for the meter alone."""
    sequence = decoding.sequence
    start, end = sequence.scored, sequence.final - 1
    scores = yield AskScore(sequence, start, end, closing=True)
    assert isinstance(scores, Scores)
    decoding.record.stats.closing_passes += 1
    decoding.score(start, scores)
    sequence.scored = end
