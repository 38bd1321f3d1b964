"""The messages between the loop and its drivers, and the record of a decoding.

The loop yields a request, and a driver answers it:

===============  =======================================================================
``AskDraft``     answered with a ``Draft``: tokens, the laws they were drawn from, signals
``AskTips``      answered with ``Tips``: the draft model's laws where a tree grows
``AskScore``     answered with ``Scores``: the target's law after each of the given tokens
===============  =======================================================================

All requests hold the sequence that they are about, which is not copied: what a model has read of it, and what of that
is still its text, is in the sequence's views.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from sprinter.decode.run_rules import DraftRun
from sprinter.decode.sequence import TokenSequence
from sprinter.decode.state import RuleState
from sprinter.laws import first_largest

__all__ = [
    "AskDraft",
    "AskScore",
    "AskTips",
    "Control",
    "Draft",
    "LawPair",
    "Origin",
    "Ranked",
    "Record",
    "Scores",
    "Stats",
    "Tips",
    "Token",
    "TopToken",
]


class LawPair(NamedTuple):
    """Target's and draft's laws at the same positions, each ``[..., V]``."""

    p: Tensor
    q: Tensor


class Control(NamedTuple):
    """What an accept rule may read beside the processed laws, at the same positions.

    Attributes:
        p, q: raw temperature-1 laws if the rule has ``needs_raw``, else the processed laws, each ``[..., V]``.
        heads: by kind, scores of heads on the target's states, for the kinds in the rule's ``needs``, ``[...]``.
    """

    p: Tensor
    q: Tensor
    heads: Mapping[str, Tensor] = MappingProxyType({})


class AskDraft(NamedTuple):
    """Ask for a draft that continues the sequence, of at most ``at_most`` tokens.

    A driver may answer with fewer than ``at_most`` tokens, and the loop asks again; with none, it calls the target.
    ``ahead``: so many tokens of a draft model are wanted in any case; None: not known. ``run``: the state of the draft
    run, for a driver that asks its rules by itself (``decode.run_rules``).
    """

    sequence: TokenSequence
    at_most: int
    ahead: int | None = None
    run: DraftRun | None = None


class Draft(NamedTuple):
    """A proposal: tokens, and the laws that they were drawn from.

    Attributes:
        tokens: n token ids.
        laws: processed draft laws q, ``[n, V]``; row i is the law that tokens[i] was drawn from.
        signals: by name, those that the method's rules declare in ``needs``, each a tensor ``[n]`` on the CPU.
        raw: temperature-1 laws ``[n, V]`` if the accept rule reads them.
        proposed: whether a proposer drafted them, for which no model runs.
    """

    tokens: tuple[int, ...]
    laws: Tensor
    signals: Mapping[str, Tensor]
    raw: Tensor | None = None
    proposed: bool = False


class AskTips(NamedTuple):
    """Ask for the draft model's laws at the tips of a tree that grows: after the sequence, or after new nodes.

    Attributes:
        paths: the tokens from the sequence to each tip; ``((),)`` in the first request for a tree.
        nodes: tokens of the new nodes, the last of each path; none in the first request. parents: the number of each
            one's parent among all nodes that were sent for this tree, -1 for the sequence.
        laws: whether the processed laws are needed. top: number of most probable tokens to name at each tip.
        depth: in the first request for a tree, its largest number of levels.
    """

    sequence: TokenSequence
    paths: Sequence[tuple[int, ...]]
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()
    laws: bool = False
    top: int = 0
    depth: int = 0


class Ranked(NamedTuple):
    """The most probable tokens at a tip, in falling order, and ln q of each at temperature 1, without truncation."""

    tokens: Sequence[int]
    logs: Sequence[float]


class Tips(NamedTuple):
    """The draft model's laws, or those of heads that draft, at the m tips of a request, in its order.

    Attributes:
        laws: processed laws ``[V]``, if asked for. top: the most probable tokens, if asked for.
        signals: by name, those that the stop rule ``needs``, ``[m]`` on the CPU.
        raws: temperature-1 laws ``[V]`` if the accept rule reads them.
        ended: there are none, because heads that draft do not reach as far: the tree ends.
        reached: numbers of the tips that have a law, which all other fields are about; None: all. Heads that draft can
            draft no token after the others, which get no children.
    """

    laws: Sequence[Tensor] = ()
    top: Sequence[Ranked] = ()
    signals: Mapping[str, Tensor] = MappingProxyType({})
    raws: Sequence[Tensor] = ()
    ended: bool = False
    reached: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class AskGrammar:
    """Ask a grammar which tokens must follow the sequence; no model is needed. Drivers ask it what they may propose.

    Attributes:
        found: the answer, once it is there: the driver waits for it.
    """

    sequence: TokenSequence
    found: Future[Sequence[int]] | Future[int]

    def answer(self) -> Sequence[int] | int | Exception:
        """Wait for it; an error concerns this text alone."""
        return self.found.exception() or self.found.result()  # type: ignore[return-value]


class AskScore(NamedTuple):
    """Ask for one target forward pass: a law after each of the sequence's tokens from ``start`` to ``end``, at least
    one, and after each of ``nodes``.

    Attributes:
        closing: whether it is the meter's closing forward pass, which is counted separately.
        nodes: tokens of a tree behind ``end``. parents: of each node, -1 for the sequence.
    """

    sequence: TokenSequence
    start: int
    end: int
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()
    closing: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that have a law behind them, in the order of the answer."""
        return (*self.sequence.tokens[self.start : self.end], *self.nodes)


@dataclass(slots=True)
class Scores:
    """The target's laws: row i of ``laws [n, V]`` is p after token i of the request; ``raw`` as in ``Draft``.

    A driver may score only the first tokens of a chain, at least all final ones: the rest of the draft is forgotten.
    ``heads``: by kind, for those that the accept rule ``needs``, the score of the target's state at token i, ``[n]``.
    ``token``: drawn from the last law, where the request is about no draft and the driver draws; None: the loop does.
    ``accepted``: where the driver has judged the draft by the loop's rule, which is lossless: number of its tokens that
    stay, and ``token`` follows them; None: the loop judges it. ``metered``: drift and ratio of trusted tokens by their
    positions, where the driver has them.
    """

    laws: Tensor
    raw: Tensor | None = None
    heads: Mapping[str, Tensor] = field(default_factory=dict)
    token: int | None = None
    accepted: int | None = None
    metered: Mapping[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def likeliest(self) -> Sequence[int]:
        """The most probable token by each law."""
        return [int(token) for token in first_largest(self.laws)[:, 0].tolist()]

    def at(self, rows: Sequence[int]) -> Tensor:
        """The laws ``[k, V]`` of these rows, in ascending order, at least one."""
        together = rows[-1] - rows[0] + 1 == len(rows)  # the usual case: a slice costs less than an index
        return self.laws[rows[0] : rows[-1] + 1] if together else self.laws[list(rows)]


class Origin(StrEnum):
    """Where a token of the output comes from."""

    TRUSTED = "trusted"  # drafted, and kept without a target check
    ACCEPTED = "accepted"  # drafted, checked and kept
    REPLACEMENT = "replacement"  # drawn by the accept rule after a rejection
    BONUS = "bonus"  # drawn from p after a whole draft was kept
    TARGET = "target"  # drawn from p when nothing was drafted


class TopToken(NamedTuple):
    """A token and its log-probability under the target's raw law, in nats."""

    id: int
    logprob: float


@dataclass(slots=True)
class Token:
    """One token of the output.

    Attributes:
        drift: TV(π, p) at its position, None until the target has scored it.
        text: the text that this token completes: the tokens' texts join to the text of the generation.
        text_offset: number of characters that the tokens before it have written, stop strings included.
        logprob: ln p(x) of the target's raw law (temperature 1, logits as the model gives them), if log-probabilities
            were asked for; None until the target has scored its position. At least -87.3 (float32's smallest number).
        draft_logprob: as ``logprob``, of the draft model; None where it drafted nothing.
        top_logprobs: the most probable tokens of the target's raw law, most probable first; None as ``logprob``.
        gate_score: the gate's score before this draft token; None: it is no draft token, or no rule reads the gate.
        ratio: p(x)/π(x), the importance weight of the token; None as ``drift``. Rules of chains give one number a
            round, the exact rule's probability of the verdict over their own, and 1 for the round's other tokens. A
            token that was trusted by its value has a bound, see ``decode.meter``.
    """

    id: int
    origin: Origin
    round: int
    drift: float | None = None
    text: str = ""
    logprob: float | None = None
    draft_logprob: float | None = None
    top_logprobs: list[TopToken] | None = None
    gate_score: float | None = None
    ratio: float | None = None
    text_offset: int = 0

    @property
    def distance(self) -> float | None:
        """The drift; where a rule of chains has none, 1 − min(1, ratio), which estimates it from one sample a round."""
        if self.drift is None and self.ratio is not None:
            return 1.0 - min(1.0, self.ratio)
        return self.drift


@dataclass(slots=True)
class Stats:
    """Counts of one decoding. Times are in seconds; prefill is counted separately.

    ``cached_tokens`` and ``draft_cached_tokens``: prompt tokens whose keys and values target and draft did not compute,
    because the cache held them from another text.

    ``mean_drift`` is None if no token was scored; ``tokens_per_target_call`` is None without target calls.
    ``worst_drift`` is the largest drift of a token; None as ``mean_drift``. ``drift_by_origin``: sum of the drifts of
    the scored tokens, by origin. ``least_ratio`` and ``largest_ratio``: of p(x)/π(x) over the scored tokens; the method
    was at most 1/``least_ratio`` times as likely as the target to write one of them. ``changed`` and ``text_drift``:
    see ``Record.count``. ``switches``: the rounds from which on the text was written without drafting, with it again,
    and so on (``never_slower``). ``copy_switches``: those from which on it was copied from the text while it was not
    drafted, no longer was, and so on. ``plain_token_s``: what a token of plain decoding costs on this machine, measured
    apart; None where that is not known, or where other rows share the passes.

    ``remote``: of a target on a server, ``round_trips`` that the text waited for (the meter's included, and those that
    it shares with other rows, whole), ``paid_tokens`` that the server read for it, and its share of ``sent_bytes`` and
    ``received_bytes``; empty without such a target.
    """

    lossless: bool = False
    new_tokens: int = 0
    target_calls: int = 0
    draft_steps: int = 0
    rounds: int = 0
    drafted: int = 0  # draft tokens that were trusted or shown to the target
    trusted: int = 0
    accepted: int = 0
    checked: int = 0  # draft tokens that a target call judged, the first rejected one included
    taken_back: int = 0  # trusted tokens that a target call refused, and those after them
    closing_passes: int = 0
    mean_drift: float | None = None
    worst_drift: float | None = None
    drift_by_origin: dict[str, float] = field(default_factory=dict)
    least_ratio: float | None = None
    largest_ratio: float | None = None
    changed: float | None = None
    text_drift: float | None = None
    drift_coverage: float = 0.0
    budget: float | None = None  # maximum mean drift a token
    spent_drift: float = 0.0  # with a budget: drift of the text
    switches: list[int] = field(default_factory=list)
    copy_switches: list[int] = field(default_factory=list)
    plain_token_s: float | None = None
    wall_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    gate_s: float = 0.0
    target_s: float = 0.0
    closing_s: float = 0.0
    target_tokens: int = 0  # tokens that the target read, without prefill and closing forward passes
    draft_tokens: int = 0
    cached_tokens: int = 0
    draft_cached_tokens: int = 0
    flops_passes: float = 0.0
    flops_tokens: float = 0.0
    remote: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_target_call(self) -> float | None:
        """New tokens per target call, without prefill."""
        return self.new_tokens / self.target_calls if self.target_calls else None

    @property
    def drift_sum(self) -> float | None:
        """Sum of the drifts of the scored tokens; None as ``mean_drift``.

        It is the expected number of these positions at which the target, after the same text so far, would have drawn
        another token, if the two draws agree as often as they can. If all tokens are scored, its mean over texts bounds
        the total variation between the law of the texts and the target's.
        """
        return None if self.mean_drift is None else self.mean_drift * self.drift_coverage * self.new_tokens

    @property
    def budget_left(self) -> float | None:
        """Drift that the text may still have at its present length; None without a budget."""
        if self.budget is None:
            return None
        return self.budget * self.new_tokens - self.spent_drift

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second of wall time, with prefill and without the meter's closing forward passes."""
        busy = self.wall_s - self.closing_s
        return self.new_tokens / busy if busy > 0 else 0.0

    @property
    def other_s(self) -> float:
        """Wall time outside the models and the gate: the loop, the draws, the caller."""
        timed = self.prefill_s + self.draft_s + self.gate_s + self.target_s + self.closing_s
        return max(0.0, self.wall_s - timed)

    @property
    def estimated_speed_up(self) -> float | None:
        """Estimate of the speed over plain decoding, prefill and closing passes apart; None: ``plain_token_s`` is."""
        seconds = self.wall_s - self.prefill_s - self.closing_s
        if self.plain_token_s is None or not self.new_tokens or seconds <= 0:
            return None
        return self.new_tokens * self.plain_token_s / seconds

    @property
    def speed(self) -> str:
        """Tokens per second, and where it is known the estimated speed over plain decoding."""
        ratio = self.estimated_speed_up
        return f"{self.tokens_per_s:.1f}/s" + ("" if ratio is None else f" (est. {ratio:.1f}x plain)")

    @property
    def summary(self) -> str:
        """Speed, target calls and drift in one line."""
        plural = "" if self.new_tokens == 1 else "s"
        calls = self.target_calls / self.new_tokens if self.new_tokens else 0.0
        drift = "drift not measured"
        if self.mean_drift is not None:
            drift = f"drift {self.mean_drift:.3f} (coverage {self.drift_coverage:.0%})"
        elif self.changed is not None:
            about = "about" if self.text_drift is not None else "at least"
            drift = f"drift {about} {self.changed / self.new_tokens:.3f} (one sample a round)"
        if self.budget is not None:
            drift += f" of a budget of {self.budget:g}"
        if self.switches:
            rests = len(self.switches) % 2 == 1
            drift += f", drafting {'stopped' if rests else 'resumed'} in round {self.switches[-1]}"
            drift += ", copies instead" if rests and len(self.copy_switches) % 2 else ""
        label = "lossless" if self.lossless else "lossy"
        count = f"{self.new_tokens} token{plural}, {self.speed}"
        if self.remote:
            moved = (self.remote["sent_bytes"] + self.remote["received_bytes"]) / 2**20
            drift += f", {self.remote['round_trips']} round trips, {moved:.1f} MiB, "
            drift += f"{self.remote['paid_tokens']} tokens paid"
        return f"{count}, {calls:.2f} target calls/token, {drift}, {label}"

    def __repr__(self) -> str:
        return f"Stats({self.summary})"


@dataclass(slots=True)
class Record:
    """The record of a decoding: final tokens in order, and counts. Only the loop writes to it.

    ``finish`` is None while decoding, then "eos", "stop" or "length". ``accept_lengths`` holds the number of
    tokens that each round added to the text (Spec-Bench's convention). ``rules``: state of the method's rules after the
    last round.
    """

    tokens: list[Token] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None
    accept_lengths: list[int] = field(default_factory=list)
    rules: RuleState | None = None

    def count(self) -> Stats:
        """Update the counts that follow from the tokens; the text may be unfinished.

        With a = min(1, p(x)/π(x)) of each token, 1 − Π a is ``text_drift``: its mean over texts is at least the total
        variation between the law of the texts and the target's, because Π a π(x) is a part of both that the two have in
        common.

        The mean of ``changed``, Σ (1 − a), is that of ``drift_sum``, from one sample a position; it is less where
        tokens were trusted by their value. For rules of chains it counts rounds, and compares verdicts on a draft.
        """
        tokens, stats = self.tokens, self.stats
        stats.new_tokens = len(tokens)
        every = [token.origin for token in tokens]
        origins = [origin for origin in Origin if origin in every]  # hashing one is slow
        stats.trusted, stats.accepted = every.count(Origin.TRUSTED), every.count(Origin.ACCEPTED)
        drifts = [token.drift for token in tokens if token.drift is not None]
        # A lossy chain rule has no drift of single positions: a mean over the others would say nothing.
        partly = len(drifts) < len(tokens)
        judged = partly and any(
            token.drift is None and token.origin is not Origin.TRUSTED for token in tokens
        )
        known = bool(drifts) and not judged
        stats.mean_drift = sum(drifts) / len(drifts) if known else None
        stats.worst_drift = max(drifts) if known else None
        by_origin = {origin: [one.drift for one in tokens if one.origin is origin] for origin in origins}
        sums = {origin.value: [one for one in each if one is not None] for origin, each in by_origin.items()}
        stats.drift_by_origin = {origin: sum(each) for origin, each in sums.items() if each}
        ratios = [token.ratio for token in tokens if token.ratio is not None]
        agreements = [min(1.0, ratio) for ratio in ratios]
        stats.least_ratio, stats.largest_ratio = min(ratios, default=None), max(ratios, default=None)
        stats.changed = sum(1 - one for one in agreements) if ratios else None
        stats.text_drift = 1 - math.prod(agreements) if len(ratios) == len(tokens) > 0 else None
        stats.drift_coverage = len(drifts) / len(tokens) if tokens else 0.0
        return stats
