"""What the loop and its drivers say to each other, and what a decoding leaves behind.

The loop yields a request, a driver answers it:

===============  =======================================================================
``AskDraft``     answered with a ``Draft``: tokens, the laws they were drawn from, signals
``AskScore``     answered with ``Scores``: the target's law after each of the given tokens
===============  =======================================================================

Both requests carry ``start`` and ``tokens``: text[:start] stands as the model has it, what it holds beyond is
forgotten (a rewind), and ``tokens`` follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.decode.state import RuleState
from sprinter.decode.tree import Tree, TreeBuilder

__all__ = [
    "AskDraft",
    "AskScore",
    "Draft",
    "LawPair",
    "Origin",
    "Record",
    "Scores",
    "Stats",
    "Token",
    "Verdict",
    "merge",
]


class LawPair(NamedTuple):
    """Target's and draft's law at the same positions, each ``[..., V]``."""

    p: Tensor
    q: Tensor


class Verdict(NamedTuple):
    """The nodes in ``path`` stay, each the child of the one before; ``token`` follows them.

    ``drifts`` holds TV(π, p) for each of these positions, None where a rule has no law of single positions.
    """

    path: Sequence[int]
    token: int
    drifts: Sequence[float | None]

    @property
    def accepted(self) -> int:
        """Number of draft tokens that stay."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class AskDraft:
    """Draft on from the text: rewind to ``start``, append ``tokens``, propose 1 to ``at_most`` tokens.

    A driver may answer with fewer than ``at_most``, and the loop asks on; with none, and the target is called.
    ``width`` > 1 asks for as many independent drafts of ``at_most`` tokens each, answered as one tree.
    ``path``: of a branching last answer, the nodes that stay; text[:start] ends with them. ``round`` is part of every
    draw's address.
    """

    start: int
    tokens: tuple[int, ...]
    round: int
    at_most: int
    width: int = 1
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal: tokens and, inseparably, the laws that they were really drawn from.

    Attributes:
        tokens: n token ids.
        laws: processed draft laws q, ``[n, V]``; row i is the law that tokens[i] was drawn from.
        signals: what the method's rules declared in ``needs``, each a tensor ``[n]`` on the host.
        raw: temperature-1 laws ``[n, V]`` if the accept rule asked for them.
        parents, branches: of several drafts, as in ``Tree``.
    """

    tokens: tuple[int, ...]
    laws: Tensor
    signals: Mapping[str, Tensor]
    raw: Tensor | None = None
    parents: tuple[int, ...] | None = None
    branches: tuple[tuple[int, ...], ...] = ()

    def tree(self) -> Tree:
        """The proposal as what a rule judges."""
        raws = [] if self.raw is None else list(self.raw)
        return Tree(self.tokens, list(self.laws), raws, self.parents, self.branches)


def merge(drafts: Sequence[Draft]) -> Draft:
    """Several drafts of one length after one prefix as one draft with branches."""
    builder, nodes = TreeBuilder(len(drafts)), list[tuple[int, int]]()
    for depth in range(len(drafts[0].tokens)):
        for n, draft in enumerate(drafts):
            if builder.add(n, draft.tokens[depth]) is not None:
                nodes.append((n, depth))
    raw = None
    if drafts[0].raw is not None:
        raw = torch.stack(
            [one.raw[depth] for one, depth in ((drafts[n], d) for n, d in nodes) if one.raw is not None]
        )
    laws = torch.stack([drafts[n].laws[depth] for n, depth in nodes])
    return Draft(tuple(builder.tokens), laws, {}, raw, tuple(builder.parents), builder.whole)


@dataclass(frozen=True, slots=True)
class AskScore:
    """One target pass: rewind to ``start``, read ``tokens`` (at least one), answer with a law after each.

    ``closing`` marks the meter's closing pass, which is counted apart. ``parents``: where the last tokens are a tree
    with branches, of each of them the one that it follows, by its place among them, -1 where it follows the text.
    ``path`` as in ``AskDraft``, of the last tree that was scored.
    """

    start: int
    tokens: tuple[int, ...]
    round: int
    closing: bool = False
    parents: tuple[int, ...] = ()
    path: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """The target's laws: row i of ``laws [n, V]`` is p after the request's token i; ``raw`` as in ``Draft``."""

    laws: Tensor
    raw: Tensor | None = None


class Origin(StrEnum):
    """Where a token of the output comes from."""

    TRUSTED = "trusted"  # drafted, kept without asking the target
    ACCEPTED = "accepted"  # drafted, checked and kept
    REPLACEMENT = "replacement"  # drawn by the accept rule after a refusal
    BONUS = "bonus"  # drawn from p after a whole draft was kept
    TARGET = "target"  # drawn from p where nothing was drafted


@dataclass(slots=True)
class Token:
    """One token of the output. ``drift`` is TV(π, p) at its position, None until the target has scored it.

    ``text`` is what became certain with this token: the tokens' texts join to the text of the generation.
    """

    id: int
    origin: Origin
    round: int
    drift: float | None = None
    text: str = ""


@dataclass(slots=True)
class Stats:
    """Counts of one decoding. Times in seconds; the prompt's own pass (``prefill``) is counted apart.

    ``mean_drift`` is None if no token was scored; ``tokens_per_target_call`` is None without a call.
    """

    lossless: bool = False
    new_tokens: int = 0
    target_calls: int = 0
    draft_steps: int = 0
    rounds: int = 0
    trusted: int = 0
    accepted: int = 0
    checked: int = 0  # untrusted draft tokens that a target call judged (up to and with the first refusal)
    closing_passes: int = 0
    mean_drift: float | None = None
    drift_coverage: float = 0.0
    wall_s: float = 0.0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    gate_s: float = 0.0
    target_s: float = 0.0
    closing_s: float = 0.0
    target_tokens: int = 0  # tokens that went through the target, without prefill and closing passes
    draft_tokens: int = 0
    flops_passes: float = 0.0
    flops_tokens: float = 0.0

    @property
    def tokens_per_target_call(self) -> float | None:
        """New tokens over target calls."""
        return self.new_tokens / self.target_calls if self.target_calls else None

    @property
    def tokens_per_s(self) -> float:
        """New tokens over wall time: prefill included, the meter's closing passes not."""
        busy = self.wall_s - self.closing_s
        return self.new_tokens / busy if busy > 0 else 0.0

    @property
    def other_s(self) -> float:
        """Wall time outside the models and the gate: the loop, the draws, the caller."""
        timed = self.prefill_s + self.draft_s + self.gate_s + self.target_s + self.closing_s
        return max(0.0, self.wall_s - timed)

    @property
    def summary(self) -> str:
        """Speed, target calls and drift in one line."""
        plural = "" if self.new_tokens == 1 else "s"
        calls = self.target_calls / self.new_tokens if self.new_tokens else 0.0
        drift = "drift not measured"
        if self.mean_drift is not None:
            drift = f"drift {self.mean_drift:.3f} (coverage {self.drift_coverage:.0%})"
        label = "lossless" if self.lossless else "lossy"
        count = f"{self.new_tokens} token{plural}, {self.tokens_per_s:.1f}/s"
        return f"{count}, {calls:.2f} target calls/token, {drift}, {label}"

    def __repr__(self) -> str:
        return f"Stats({self.summary})"


@dataclass(slots=True)
class Record:
    """What a decoding leaves behind: final tokens in order, and counts. The loop appends, others read.

    ``finish`` is None while decoding, then "eos", "stop" or "length". ``accept_lengths`` holds the tokens that each
    round added to the text (Spec-Bench's convention). ``rules``: state of the method's rules after the last round.
    """

    tokens: list[Token] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish: str | None = None
    accept_lengths: list[int] = field(default_factory=list)
    rules: RuleState | None = None

    def count(self) -> Stats:
        """Bring the counts that follow from the tokens up to date; the text may have been abandoned half-way."""
        tokens, stats = self.tokens, self.stats
        stats.new_tokens = len(tokens)
        stats.trusted = sum(token.origin is Origin.TRUSTED for token in tokens)
        stats.accepted = sum(token.origin is Origin.ACCEPTED for token in tokens)
        drifts = [token.drift for token in tokens if token.drift is not None]
        stats.mean_drift = sum(drifts) / len(drifts) if drifts else None
        stats.drift_coverage = len(drifts) / len(tokens) if tokens else 0.0
        return stats
