"""The real decode loop answered by recorded laws, without any model.

A text of the loop walks along a recorded text: at its position t the models' laws are those of the recording's position
t, whatever tokens were written before. Draws are coupled with the recorded token x_t as closely as their laws allow:

* a draft token is x_t with chance min(1, q(x_t)/μ(x_t)), μ being the law that x_t was drawn from;
* it is kept by a uniform number that is small where it is x_t, large where it is not;
* what replaces it, and what the target writes, is x_t with the largest chance that the law allows.

Every draw keeps its law exactly, so chances of trust, stop, acceptance and drift at a position are those of the method.
Where the method's text has the law that the recorded text was drawn from, it *is* the recorded text: an exact method
on a text by the target is replayed without error, the dependence of acceptance on what was written before included. A
lossy method leaves the record at ``Replay.parted`` of its tokens; after these the recorded prefix stands in for its
own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from sprinter.decode.accept import AcceptRule, Exact, Judge
from sprinter.decode.checks import at_least
from sprinter.decode.costs import PassCosts
from sprinter.decode.decoding import Answer, LoopRequest
from sprinter.decode.draft import (
    AskDraft,
    AskScore,
    AskTips,
    Control,
    Draft,
    Origin,
    Record,
    Scores,
    Stats,
    Tips,
    Token,
)
from sprinter.decode.drafter import Context, Proposals
from sprinter.decode.grow import ranked
from sprinter.decode.loop import Limits, decode
from sprinter.decode.method import Method
from sprinter.decode.sequence import depths_of
from sprinter.decode.signals import HEADS, SIGNALS, given_by, prefix_signals, read_signals
from sprinter.errors import UserError
from sprinter.laws import kl_divergence, one_hot
from sprinter.random import Draws, Purpose
from sprinter.theory.montecarlo import answer_all
from sprinter.theory.recording import Recording

__all__ = ["CoupledDraws", "Replay", "ReplayDriver", "check_replayable", "replay", "unrecorded"]


@dataclass(frozen=True)
class Replay:
    """Sums over replayed texts.

    Attributes:
        tokens, target_calls, draft_steps, trusted, accepted, checked, rounds: as in the stats.
        drift: sum of TV(π, p). scored: tokens that it is summed over.
        kl: sum of KL(p‖π) over all tokens, in nats; infinite where π lacks a token of p's, NaN as ``mean_drift``.
        read: tokens that went through the target. parted: tokens that were not the recorded ones.
        by_text: tokens, target calls, drift and draft steps of each text, ``[texts, 4]``.
    """

    tokens: float
    target_calls: float
    draft_steps: float
    trusted: float
    accepted: float
    checked: float
    rounds: float
    drift: float
    scored: float
    read: float
    parted: float
    kl: float
    by_text: Tensor = field(repr=False)

    @property
    def tokens_per_call(self) -> float | None:
        """Tokens a target call; None without a call."""
        return self.tokens / self.target_calls if self.target_calls else None

    @property
    def mean_drift(self) -> float:
        """Mean TV(π, p) a token; NaN if the method's rule has none for single positions (a lossy ``ChainRule``)."""
        return self.drift / self.scored if self.scored else math.nan

    def token_s(self, costs: PassCosts) -> float:
        """Seconds of both models per new token."""
        asked = (
            self.target_calls * costs.target_s(self.read / self.target_calls) if self.target_calls else 0.0
        )
        return (self.draft_steps * costs.draft_s(1) + asked) / self.tokens

    def speed_up(self, costs: PassCosts) -> float:
        """Speed relative to plain decoding with the target."""
        return costs.target_s(1) / self.token_s(costs)

    @property
    def mean_kl(self) -> float:
        """Mean KL(p‖π) a token, in nats; along texts of the target it is KL(p‖π) of texts divided by their length."""
        return self.kl / self.tokens


class CoupledDraws:
    """Draws of one text, each with its exact law, coupled with the recorded text.

    Args:
        first: the recording's position of the text's first token; ``last``: of its last one. The loop's text has one
            token before it.
        coupled: False draws without regard to the recorded text.
        head: number of tokens at the beginning that the exact rule judges.
    """

    def __init__(
        self,
        recording: Recording,
        accept: Judge,
        first: int,
        last: int,
        numbers: np.random.Generator,
        coupled: bool = True,
        head: int = 0,
    ) -> None:
        self._recording, self._accept, self._numbers, self._coupled = recording, accept, numbers, coupled
        self._first, self._last, self._head = first, last, head
        self._drafted: dict[int, tuple[int, Tensor]] = {}
        self._refused = -1

    def place(self, position: int) -> int:
        """The recording's position that stands for a position of the loop's text."""
        return min(self._first + position - 1, self._last)

    def proposed(self, position: int, y: int, law: Tensor) -> None:
        """A draft token and the law that it was drawn from."""
        self._drafted[position] = (y, law)

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One outcome from ``law [K]``."""
        if not self._coupled:
            return self.draw(law)
        n = self.place(position)
        x, given = int(self._recording.tokens[n]), self._recording.own[n]
        if purpose is not Purpose.DRAFT and position == self._refused:
            rule = Exact() if position <= self._head else self._accept.per_position
            given = self._given_refusal(n, rule, *self._drafted[position])
        self._refused = -1
        if self._numbers.random() * float(given[x]) < float(law[x]):
            return x
        rest = (law - given).clamp(min=0)
        return self.draw(rest) if float(rest.sum()) > 0 else x  # nothing but rounding is left

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1)."""
        return float(self._numbers.random())

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """u < chance for each, u small where the draft token is the recorded one; drawn up to the first refusal."""
        kept = [False] * len(chances)
        for i, b in enumerate(chances):
            if not self._uniform_for(position + i) < b:
                self._refused = position + i
                break
            kept[i] = True
        return kept

    def _uniform_for(self, position: int) -> float:
        u = float(self._numbers.random())
        if not self._coupled:
            return u
        n, (y, law) = self.place(position), self._drafted[position]
        # the chance that y, once drawn, is the recorded token
        same = min(1.0, float(self._recording.own[n][y]) / float(law[y]))
        return u * same if y == int(self._recording.tokens[n]) else same + u * (1 - same)

    def _given_refusal(self, n: int, rule: AcceptRule | None, y: int, law: Tensor) -> Tensor:
        """The law of the recorded token, given that the draft token was refused."""
        own = self._recording.own[n]
        assert rule is not None
        p, q = self._recording.p[n : n + 1], law.unsqueeze(0)
        raw = Control(self._recording.raw_p[n : n + 1], self._recording.raw_q[n : n + 1])
        control = raw if rule.needs_raw else None
        kept, common = (law * rule.keep(p, q, control)[0]), torch.minimum(law, own)
        excess = (own - law).clamp(min=0)
        apart = (law - torch.maximum(kept, common)).clamp(min=0).sum() / excess.sum().clamp(min=1e-30)
        given = (common - kept).clamp(min=0) + excess * apart
        total = given.sum()
        return given / total if float(total) > 0 else own

    def draw(self, weights: Tensor) -> int:
        """An index with chances proportional to ``weights [n]``."""
        bounds = weights.double().cumsum(-1).numpy()
        found = np.searchsorted(bounds, self._numbers.random() * bounds[-1], side="right")
        return min(int(found), len(bounds) - 1)


class _ProposerDraws:
    """A proposer's draws, from laws over the vocabulary, by the coupled draws over a recording's outcomes.

    Args:
        shift: a proposer's position in the text minus the loop's.
    """

    def __init__(self, draws: CoupledDraws, recording: Recording, shift: int) -> None:
        self._draws, self._recording, self._shift = draws, recording, shift

    def token(self, law: Tensor, round: int, position: int, purpose: Purpose, row: int = 0) -> int:
        """One token id from ``law [V]``: an outcome, then one of its tokens."""
        position -= self._shift
        outcomes, of = self._recording.grouped(self._draws.place(position), law)
        ids = of[self._draws.token(outcomes, round, position, purpose, row)]
        return ids[0] if len(ids) == 1 else ids[self._draws.draw(law[ids])]

    def uniform(self, round: int, position: int, purpose: Purpose, row: int = 0) -> float:
        """One number in [0, 1)."""
        return self._draws.uniform(round, position - self._shift, purpose, row)

    def keep(self, chances: Sequence[float], round: int, position: int, row: int = 0) -> list[bool]:
        """u < chance for each, without regard to the recorded text."""
        return [self.uniform(round, position, Purpose.ACCEPT, row) < chance for chance in chances]


class ReplayDriver:
    """Answers the loop from one text of a recording.

    Args:
        text: number of the text. stats: draft steps and tokens read are added here.
    """

    def __init__(
        self, recording: Recording, method: Method, text: int, draws: CoupledDraws, stats: Stats
    ) -> None:
        self._recording, self._draws, self._stats = recording, draws, stats
        self._drafter, self._needs_raw = method.drafter, method.accept.needs_raw
        self._proposals = Proposals.of(method.drafter)
        self._needs = method.needs
        self._signals = [name for name in method.needs if name in recording.signals]
        self._heads = {kind: head for kind, head in recording.heads.items() if kind in method.needs}
        self._made = method.needs & _made() & SIGNALS.keys()
        self._place = (0, 0)  # round, tokens drafted in it
        self._whole = method.length is not None and method.trust.never  # a run's length is known beforehand
        self._prompt, self._first = list(recording.prompts[text]), recording.starts[text]

    def answer(self, request: LoopRequest) -> Answer:
        """Answer one request of the loop: a ``Draft``, ``Tips`` or ``Scores``."""
        if isinstance(request, AskScore):
            return self._score(request)
        if isinstance(request, AskTips):
            return self._tips(request)
        assert isinstance(request, AskDraft)
        position, round = len(request.sequence), request.sequence.round
        if self._proposals is not None:
            draft = self._ask_proposer(self._proposals, position, request)
            if draft is not None:
                return draft
        whole = self._whole and self._proposals is None
        count = request.at_most if whole else 1
        self._stats.draft_steps += count
        return self._propose(round, position, count)

    def _tips(self, request: AskTips) -> Tips:
        """The recorded laws at the positions of the tips."""
        self._stats.draft_steps += 1
        places = [self._draws.place(len(request.sequence) + len(path)) for path in request.paths]
        laws, raw = self._recording.q[places], self._recording.raw_q[places]
        signals = {name: self._recording.signals[name][places] for name in self._signals}
        if self._made:
            made = read_signals(self._made, laws, raw)
            signals |= {name: values.double() for name, values in made.items()}
        if self._drafter.greedy:
            laws = one_hot(laws)
        return Tips(list(laws), ranked(raw.log(), request.top), signals, list(raw) if self._needs_raw else ())

    def _score(self, request: AskScore) -> Scores:
        places = self._places(request.start + 1, request.end - request.start)
        places += [self._draws.place(request.end + depth) for depth in depths_of(request.parents)]
        if not request.closing:
            self._stats.target_tokens += len(places)
        return Scores(self._recording.p[places], self._recording.raw_p[places] if self._needs_raw else None)

    def _propose(self, round: int, position: int, count: int) -> Draft:
        places = self._places(position, count)
        laws = self._recording.q[places]
        if self._drafter.greedy:
            laws = one_hot(laws)
        tokens = []
        for i, law in enumerate(laws):
            tokens.append(self._draws.token(law, round, position + i, Purpose.DRAFT))
            self._draws.proposed(position + i, tokens[-1], law)
        return self._draft(round, places, tokens, laws)

    def _draft(self, round: int, places: list[int], tokens: Sequence[int], laws: Tensor) -> Draft:
        raw = self._recording.raw_q
        signals = {name: self._recording.signals[name][places] for name in self._signals}
        if self._made:
            made = read_signals(self._made, laws, raw[places], torch.tensor(tokens))
            signals |= {name: values.double() for name, values in made.items()}
        if self._heads:
            signals |= self._scores(round, places, tokens)
        return Draft(tuple(tokens), laws, signals, raw[places] if self._needs_raw else None)

    def _scores(self, round: int, places: list[int], tokens: Sequence[int]) -> dict[str, Tensor]:
        """Of the heads that look at the run or the token."""
        drafted = self._place[1] if self._place[0] == round else 0
        self._place = (round, drafted + len(tokens))
        made = {
            "position": torch.arange(drafted + 1, drafted + len(tokens) + 1),
            "log_q": self._recording.raw_q[places, list(tokens)].log(),
        }
        if drafted == 0 and any("hidden_x" in head.features for head in self._heads.values()):
            self._stats.draft_steps += 1  # a run's last token is read by the draft, too
        kept = self._recording.features
        read = {
            kind: {name: made[name] if name in made else kept[name][places] for name in head.features}
            for kind, head in self._heads.items()
        }
        return {kind: head(read[kind]).double() for kind, head in self._heads.items()}

    def _ask_proposer(self, proposals: Proposals, position: int, request: AskDraft) -> Draft | None:
        """What a drafter proposes after the recorded text; None: the draft model drafts.

        A proposal's laws are over the vocabulary, a recording's over its outcomes.
        """
        ids = self._recording.ids[self._first : self._first + position - 1].tolist()
        text, vocab = [*self._prompt, *ids], self._recording.vocab
        draws, like = _ProposerDraws(self._draws, self._recording, len(text) - position), self._recording.q
        context = Context(text, request.sequence.round, request.at_most, vocab, draws, like)
        draft = proposals.draft(context, self._needs, self._needs_raw)
        if draft is None:
            return None
        places = self._places(position, len(draft.tokens))
        laws = [self._recording.grouped(n, law)[0] for n, law in zip(places, draft.laws, strict=True)]
        tokens = [self._recording.outcome(n, id) for n, id in zip(places, draft.tokens, strict=True)]
        for i, y in enumerate(tokens):
            self._draws.proposed(position + i, y, laws[i])
        found = torch.stack(laws) if laws else like[:0]
        return draft._replace(tokens=tuple(tokens), laws=found, raw=None if draft.raw is None else found)

    def _places(self, position: int, count: int) -> list[int]:
        return [self._draws.place(position + i) for i in range(count)]


def _made() -> frozenset[str]:
    """Signals that a replay makes itself: random numbers, and of the laws those that see x and no hidden state."""
    seeing = {name for name, one in SIGNALS.items() if one.sees_token and not one.reads("state")}
    return given_by("draws") | seeing


def unrecorded(recording: Recording, method: Method) -> frozenset[str]:
    """Signals that a method needs and a replay of this recording cannot give."""
    return method.needs - _made() - recording.signals.keys() - recording.heads.keys()


def check_replayable(method: Method, heads: Collection[str]) -> None:
    """Before anything is recorded: would recordings of a pair with heads of these kinds do for the method?

    Raises:
        UserError: the method needs a signal that neither laws nor these heads give.
    """
    _refuse(method, method.needs - _made() - prefix_signals() - set(heads))


def _refuse(method: Method, missing: frozenset[str]) -> None:
    drafter = method.drafter
    if drafter.target_states or drafter.by_heads or drafter.recycles or method.accept.needs:
        what = "laws after drafts" if drafter.recycles else "hidden states"
        raise UserError(
            f"method {method.name} reads the target's {what}, which no recording holds: "
            "measure it with 'sprinter bench'"
        )
    if drafter.tokens_a_pass > 1:
        raise UserError(
            f"method {method.name} drafts from laws over masks, which no recording holds: "
            "measure it with 'sprinter bench'"
        )
    if not missing:
        return
    what = "a gate" if "gate" in missing else f"the signal {', '.join(sorted(missing))}"
    mend = "give the pair that head" if missing <= HEADS else "a replay knows laws and scores of heads alone"
    raise UserError(f"method {method.name} needs {what}, which is not recorded: {mend}")


def replay(
    recording: Recording,
    method: Method,
    *,
    repeats: int = 1,
    seed: int = 0,
    coupled: bool = True,
) -> Replay:
    """Decode every recorded text ``repeats`` times.

    Raises:
        UserError: the method needs a signal that was not recorded.
    """
    at_least("repeats", repeats, 1)
    method = method.settle(recording.taus)
    _refuse(method, unrecorded(recording, method))
    numbers = np.random.default_rng(seed)
    rows = []
    for k, (first, length) in enumerate(zip(recording.starts, recording.lengths, strict=True)):
        rows += [_replay_text(recording, method, k, first, length, numbers, coupled) for _ in range(repeats)]
    table = torch.tensor(rows, dtype=torch.float64)
    sums = table.sum(0).tolist()
    shown = [_COLUMNS.index(name) for name in ("tokens", "target_calls", "drift", "draft_steps")]
    by_text = table.reshape(-1, repeats, table.shape[-1]).sum(1)[:, shown]
    return Replay(**dict(zip(_COLUMNS, sums, strict=True)), by_text=by_text)


_COLUMNS = (
    "tokens", "target_calls", "draft_steps", "trusted", "accepted", "checked", "rounds", "drift", "scored", "read",
    "parted", "kl",
)  # fmt: skip


def _replay_text(
    recording: Recording,
    method: Method,
    k: int,
    first: int,
    length: int,
    numbers: np.random.Generator,
    coupled: bool,
) -> tuple[float, ...]:
    record = Record()
    # The coupling of a refusal is made of the b of one position, which not every rule has; a given text was drawn from
    # neither law.
    positional = method.accept.per_position is not None and method.tail_ratio is None
    positional = positional and (not method.budget or method.accept.lossless)  # else by one of two rules
    coupled = coupled and positional and recording.writer != "given"
    lossless = replace(method, budget=None).lossless()
    head = 0 if lossless else length if method.budget == 0 else method.head
    draws = CoupledDraws(recording, method.accept, first, first + length - 1, numbers, coupled, head)
    driver = ReplayDriver(recording, method, k, draws, record.stats)
    limits = Limits(recording.new_tokens, lambda text: "eos" if len(text) > length else None)
    answer_all(decode((0,), method, limits, draws, record, complete=True), driver.answer)
    stats, tokens = record.count(), record.tokens
    unknown = any(token.drift is None and token.origin is not Origin.TRUSTED for token in tokens)
    drifts = [math.nan if unknown else token.drift for token in tokens if token.drift is not None]
    written = recording.tokens[first : first + length].tolist()
    parted = sum(token.id != x for token, x in zip(tokens, written, strict=True))
    return (
        stats.new_tokens, stats.target_calls, stats.draft_steps, stats.trusted, stats.accepted, stats.checked,
        stats.rounds, sum(drifts), len(drifts), stats.target_tokens, parted,
        math.nan if unknown else _divergence(recording, method, first, tokens),
    )  # fmt: skip


def _divergence(recording: Recording, method: Method, first: int, tokens: Sequence[Token]) -> float:
    """Sum of KL(p‖π) over a replayed text: π is q where a token was trusted, the accept rule's law where it drifts."""
    trusted = [first + i for i, token in enumerate(tokens) if token.origin is Origin.TRUSTED]
    drifting = [first + i for i, token in enumerate(tokens) if token.drift]
    judged = sorted({*drifting} - {*trusted})
    total, rule = 0.0, method.accept.per_position
    if (trusted or judged) and method.drafter.proposer is not None:
        return math.nan  # the laws of its proposals are not recorded
    if trusted:
        q = one_hot(recording.q[trusted]) if method.drafter.greedy else recording.q[trusted]
        total += float(kl_divergence(recording.p[trusted].double(), q.double()).sum())
    if judged:
        assert rule is not None, "a rule of chains has an unknown drift"
        p, q = recording.p[judged], recording.q[judged]
        raw = Control(recording.raw_p[judged], recording.raw_q[judged]) if rule.needs_raw else None
        total += float(kl_divergence(p.double(), rule.law(p, q, raw).double()).sum())
    return total


_: tuple[type[Draws], ...] = (CoupledDraws, _ProposerDraws)
