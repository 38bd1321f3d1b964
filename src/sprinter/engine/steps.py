"""Steps over several rows at once: a draft step, and a target forward pass.

A draft step is one unit: forward pass → processed laws → addressed draws → signals → scores of heads. Each row has its
own sampling, draws, round and position, and its results do not depend on other rows, except for rounding in the models.
``DraftSteps`` and ``TargetPasses`` are the interfaces; the eager versions here work with any runner and can be replaced
by captured ones.

The time of a forward pass is divided equally among its rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjust
from sprinter.decode.signals import SIGNALS
from sprinter.engine.rows import FINAL, After, CacheRows, RowInput
from sprinter.errors import SprinterError
from sprinter.heads.features import DraftStep, read_features
from sprinter.heads.head import Head
from sprinter.laws import Sampling, process, raw_law
from sprinter.random import Draws, Purpose

__all__ = [
    "DraftPlan", "DraftRow", "DraftSteps", "Drafted", "EagerDraftSteps", "EagerTargetPasses", "Scored",
    "StepsOfPair", "TargetPasses", "TargetRow", "eager_steps", "later",
]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """The settings that all draft steps of a request share.

    Attributes:
        sampling: temperature and truncation of the processed law.
        signals: names of ``sprinter.decode.signals.SIGNALS`` that the rules read.
        heads: by kind, those that the rules read.
        raw: whether the answer must contain raw laws (temperature 1, no truncation).
        needs_raw: whether the step computes the raw law.
        reads_x: whether a head reads the hidden state at x; the step then runs the model on x too.
        captures: whether the step can be captured. asked_signals: signals whose ``capture`` is "asked".
    """

    sampling: Sampling
    signals: tuple[str, ...] = ()
    heads: Mapping[str, Head] = field(default_factory=dict)
    raw: bool = False

    needs_raw: bool = field(init=False)
    reads_x: bool = field(init=False)
    captures: bool = field(init=False)
    asked_signals: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        features = {feature for head in self.heads.values() for feature in head.features}
        signals = [SIGNALS[name] for name in self.signals]
        by_laws = not _STATES.issuperset(features) or any(one.reads("raw") for one in signals)
        asked = frozenset(one.name for one in signals if one.capture == "asked")
        reads_x = "hidden_x" in features
        object.__setattr__(self, "needs_raw", self.raw or by_laws)
        object.__setattr__(self, "reads_x", reads_x)
        object.__setattr__(self, "captures", not reads_x and all(one.capture != "never" for one in signals))
        object.__setattr__(self, "asked_signals", asked)


@dataclass(slots=True)
class DraftRow:
    """One row of a draft step.

    Attributes:
        row: index of the row in the runner.
        tokens: unread tokens; () if the last step ran the model on x.
        position: position in the text of the token to draft, so that the row holds ``position - len(tokens)`` tokens
            before the step; ``round`` and ``draft`` (index of the draft if a round has several) complete the address of
            the draw.
        place: position of that token in its draft run, from 1; heads read it.
        count: number of tokens to draft.
        after: the model's output after the text, if ``tokens`` is ().
        adjust: adjusts the logits to the text; only with a ``count`` of 1.
    """

    row: int
    tokens: Sequence[int]
    position: int
    round: int
    draws: Draws
    plan: DraftPlan
    draft: int = 0
    place: int = 1
    count: int = 1
    after: After | None = None
    adjust: Adjust | None = None

    @property
    def feed(self) -> RowInput:
        """The first input of the row, from the length that the step starts from."""
        return RowInput(self.row, self.position - len(self.tokens), self.tokens)


@dataclass(slots=True)
class Drafted:
    """One token that a row drafted.

    Attributes:
        token: x.
        law: ``[V]`` that it was drawn from; raw: ``[V]`` or None.
        signals: by name, signals and scores of heads.
        feeds: number of tokens that the row read in each of its forward passes.
        after: the model's output after x, if it ran on x.
        draft_s, gate_s: the row's share of the step's time, in seconds: without the heads, and of the heads.
    """

    token: int
    law: Tensor
    raw: Tensor | None
    signals: dict[str, float]
    feeds: list[int]
    after: After | None = None
    draft_s: float = 0.0
    gate_s: float = 0.0


@dataclass(slots=True)
class TargetRow:
    """One row of a target forward pass: ``feed`` holds its unread tokens. ``raw``: whether to return raw laws too.

    ``layers``: decoder layers whose hidden states to return, or ``FINAL``. ``adjust``: adjusts the logits of the feed.
    """

    feed: RowInput
    sampling: Sampling
    raw: bool = False
    layers: tuple[int, ...] = ()
    adjust: Adjust | None = None


@dataclass(slots=True)
class Scored:
    """The target's laws after each token of a row, ``[n, V]``, and the row's share of the time in seconds.

    ``states``: hidden states ``[n, d]`` of each of the row's ``layers``.
    """

    laws: Tensor
    raw: Tensor | None
    target_s: float
    states: Sequence[Tensor] = ()


class DraftSteps(Protocol):
    """Draft ``count`` tokens in each of some rows (each row at most once), in as many steps.

    Each row starts from the length that it names.
    """

    def __call__(self, rows: Sequence[DraftRow]) -> list[list[Drafted] | SprinterError]:
        """Return, for each row in order, its tokens or its error; an error does not affect other rows."""
        ...


class TargetPasses(Protocol):
    """One target forward pass over some rows (each row at most once), as ``DraftSteps``."""

    def __call__(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """Return, for each row in order, its laws or its error."""
        ...


StepsOfPair = Callable[[CacheRows | None, CacheRows | None], tuple[DraftSteps | None, TargetPasses | None]]
"""Makes draft steps over the draft's rows and passes over the target's; None: the model is not used."""


class EagerDraftSteps:
    """Draft steps one operation at a time, on any runner."""

    def __init__(self, rows: CacheRows) -> None:
        self._rows = rows

    def __call__(self, rows: Sequence[DraftRow]) -> list[list[Drafted] | SprinterError]:
        """See ``DraftSteps``."""
        drafted: list[list[Drafted]] = [[] for _ in rows]
        faults: dict[int, SprinterError] = {}
        live, asked = list(range(len(rows))), list(rows)
        with torch.inference_mode():
            while live:
                for i, one in zip(live, self._step(asked), strict=True):
                    if isinstance(one, SprinterError):
                        faults[i] = one
                    else:
                        drafted[i].append(one)
                live = [i for i in live if i not in faults and rows[i].count > len(drafted[i])]
                asked = [later(rows[i], drafted[i]) for i in live]
        return [faults.get(i, own) for i, own in enumerate(drafted)]

    def _step(self, rows: Sequence[DraftRow]) -> list[Drafted | SprinterError]:
        began = time.perf_counter()
        logits, hidden, faults = self._after_text(rows)
        if not faults:
            return self._draw(rows, logits, hidden, began)
        fine = [i for i in range(len(rows)) if i not in faults]
        drawn = iter(self._draw([rows[i] for i in fine], logits[fine], hidden[fine], began) if fine else ())
        return [faults[i] if i in faults else next(drawn) for i in range(len(rows))]

    def _draw(
        self, rows: Sequence[DraftRow], logits: Tensor, hidden: Tensor, began: float
    ) -> list[Drafted | SprinterError]:
        """Laws, draws, signals and scores, from logits ``[rows, V]`` and states ``[rows, d]`` after each text."""
        adjusted = _adjusted(logits[:, None].unbind(), rows)
        laws = _processed(logits if adjusted is None else adjusted, [row.plan.sampling for row in rows])
        raws = raw_law(logits) if any(row.plan.needs_raw for row in rows) else None
        drafted = []
        for i, row in enumerate(rows):
            token = row.draws.token(laws[i], row.round, row.position, Purpose.DRAFT, row.draft)
            raw = raws[i] if raws is not None and row.plan.raw else None
            drafted.append(Drafted(token, laws[i], raw, {}, [len(row.tokens)] if row.tokens else []))
        _read_signals(rows, drafted, laws, raws, hidden)
        _share(drafted, "draft_s", began)
        faults = self._score_heads(rows, drafted, hidden, raws) if any(row.plan.heads for row in rows) else {}
        return [faults.get(i, one) for i, one in enumerate(drafted)]

    def _after_text(self, rows: Sequence[DraftRow]) -> tuple[Tensor, Tensor, dict[int, SprinterError]]:
        """Logits ``[rows, V]`` and states ``[rows, d]`` after each row's text, and errors by index."""
        new = [i for i, row in enumerate(rows) if row.tokens]
        if len(new) == len(rows):
            return self._last([row.feed for row in rows])
        # known for rows in which a head read the state at x
        after = {i: row.after for i, row in enumerate(rows) if row.after is not None}
        faults: dict[int, SprinterError] = {}
        if new:
            logits, hidden, found = self._last([rows[i].feed for i in new])
            after |= {i: (logits[at], hidden[at]) for at, i in enumerate(new)}
            faults = {new[at]: fault for at, fault in found.items()}
        said = [after[i] for i in range(len(rows))]
        return torch.stack([one for one, _ in said]), torch.stack([state for _, state in said]), faults

    def _last(self, feeds: Sequence[RowInput]) -> tuple[Tensor, Tensor, dict[int, SprinterError]]:
        """Run a forward pass: logits ``[rows, V]``, states ``[rows, d]`` after each last token; errors by index."""
        logits, hidden, faults, _ = self._rows.read(feeds)
        ends = [len(feed.tokens) - 1 for feed in feeds]
        if min(ends) == max(ends):
            return logits[:, -1], hidden[:, -1], faults
        return logits[range(len(ends)), ends], hidden[range(len(ends)), ends], faults

    def _score_heads(
        self, rows: Sequence[DraftRow], drafted: Sequence[Drafted], hidden: Tensor, raws: Tensor | None
    ) -> dict[int, SprinterError]:
        """Score the drafted tokens, with one call per head for all rows that have the same heads.

        If a head reads the state at x, the model runs on x now, and the row's next token is drawn from that output.

        Returns:
            Errors of that forward pass, by index of the row.
        """
        began = time.perf_counter()
        reads_x = [i for i, row in enumerate(rows) if row.plan.reads_x]
        at_x: dict[int, Tensor] = {}
        faults: dict[int, SprinterError] = {}
        if reads_x:
            feeds = [RowInput(rows[i].row, rows[i].position, [drafted[i].token]) for i in reads_x]
            logits, after, found = self._last(feeds)
            faults = {reads_x[at]: fault for at, fault in found.items()}
            for at, i in enumerate(reads_x):
                drafted[i].after = logits[at], after[at]
                drafted[i].feeds.append(1)
                at_x[i] = after[at]
            _share([drafted[i] for i in reads_x], "draft_s", began)
        for group in _alike(rows, lambda row: tuple(row.plan.heads.values())):
            heads = rows[group[0]].plan.heads
            if not heads:
                continue
            began = time.perf_counter()
            step: DraftStep | None = None
            for name, head in heads.items():
                if head.features == ("hidden",):
                    scores = head(hidden if len(group) == len(rows) else hidden[group])
                else:
                    step = step or _facts(rows, drafted, group, hidden, raws, at_x)
                    scores = head(read_features(head.features, step))
                for i, score in zip(group, scores.tolist(), strict=True):
                    drafted[i].signals[name] = score
            _share([drafted[i] for i in group], "gate_s", began)
        return faults


class EagerTargetPasses:
    """Target forward passes one operation at a time, on any runner."""

    def __init__(self, rows: CacheRows) -> None:
        self._rows = rows

    def __call__(self, rows: Sequence[TargetRow]) -> list[Scored | SprinterError]:
        """See ``TargetPasses``."""
        began = time.perf_counter()
        layers = sorted({layer for row in rows for layer in row.layers} - {FINAL})
        with torch.inference_mode():
            result = self._rows.read([row.feed for row in rows], layers)
            logits, faults = result.logits, result.faults
            fine = [i for i in range(len(rows)) if i not in faults]
            if not fine:
                return [faults[i] for i in range(len(rows))]
            laws, raws = _row_laws(logits[fine] if faults else logits, [rows[i] for i in fine])
            if logits.device.type != "cpu":
                torch.accelerator.synchronize(logits.device)
        seconds = (time.perf_counter() - began) / len(rows)
        states = {FINAL: result.hidden, **dict(zip(layers, result.layers, strict=True))}
        scored = {
            i: Scored(
                law, raw, seconds, [states[layer][i, : len(rows[i].feed.tokens)] for layer in rows[i].layers]
            )
            for i, law, raw in zip(fine, laws, raws, strict=True)
        }
        return [faults.get(i) or scored[i] for i in range(len(rows))]


def eager_steps(
    draft: CacheRows | None, target: CacheRows | None
) -> tuple[EagerDraftSteps | None, EagerTargetPasses | None]:
    """See ``StepsOfPair``."""
    return EagerDraftSteps(draft) if draft else None, EagerTargetPasses(target) if target else None


def _row_laws(logits: Tensor, rows: Sequence[TargetRow]) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Laws ``[own n, V]`` of each row of ``logits [rows, n, V]``, and raw laws for rows that ask for them."""
    if len(rows) == 1:
        row, only = rows[0], logits[0]
        adjusted = only if row.adjust is None else row.adjust(only)
        return [process(adjusted, row.sampling)], [raw_law(only) if row.raw else None]
    laws: list[Tensor] = [logits] * len(rows)
    raws: list[Tensor | None] = [None] * len(rows)
    for group in _alike(rows, lambda row: (row.sampling, row.raw)):
        first, counts = rows[group[0]], [len(rows[i].feed.tokens) for i in group]
        each = [logits[i, :n] for i, n in zip(group, counts, strict=True)]
        whole = len(group) == len(rows) and all(n == logits.shape[1] for n in counts)
        own = logits.flatten(0, 1) if whole else torch.cat(each)
        others = _adjusted(each, [rows[i] for i in group])
        law = torch.split(process(own if others is None else others, first.sampling), counts)
        raw = torch.split(raw_law(own), counts) if first.raw else [None] * len(group)
        for at, i in enumerate(group):
            laws[i], raws[i] = law[at], raw[at]
    return laws, raws


def later(row: DraftRow, drafted: Sequence[Drafted], count: int = 1) -> DraftRow:
    """The row after the tokens in ``drafted``, to draft ``count`` more."""
    n, after = len(drafted), drafted[-1].after
    unread = (drafted[-1].token,) if after is None else ()
    return DraftRow(
        row.row,
        unread,
        row.position + n,
        row.round,
        row.draws,
        row.plan,
        row.draft,
        row.place + n,
        count,
        after,
    )


def _share(drafted: Sequence[Drafted], name: str, began: float) -> None:
    seconds = (time.perf_counter() - began) / len(drafted)
    for one in drafted:
        setattr(one, name, getattr(one, name) + seconds)


_Line = TypeVar("_Line")


def _alike(rows: Sequence[_Line], key: Callable[[_Line], Hashable]) -> list[list[int]]:
    """Group the indices of rows by key."""
    if len(rows) == 1:
        return [[0]]
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(key(row), []).append(i)
    return list(groups.values())


def _adjusted(logits: Sequence[Tensor], rows: Sequence[DraftRow] | Sequence[TargetRow]) -> Tensor | None:
    """The rows' logits ``[own n, V]``, each adjusted to its text, joined; None if no row adjusts any."""
    ways = [row.adjust for row in rows]
    if not any(ways):
        return None
    return torch.cat([one if way is None else way(one) for one, way in zip(logits, ways, strict=True)])


def _processed(logits: Tensor, samplings: Sequence[Sampling]) -> Sequence[Tensor]:
    """Row i of ``logits [rows, V]`` processed by ``samplings[i]``, each ``[V]``."""
    groups = _alike(samplings, lambda sampling: sampling)
    if len(groups) == 1:
        return process(logits, samplings[0]).unbind()
    laws: list[Tensor] = [logits] * len(samplings)
    for group in groups:
        for i, law in zip(group, process(logits[group], samplings[group[0]]), strict=True):
            laws[i] = law
    return laws


def _read_signals(
    rows: Sequence[DraftRow],
    drafted: Sequence[Drafted],
    laws: Sequence[Tensor],
    raws: Tensor | None,
    hidden: Tensor,
) -> None:
    if not any(row.plan.signals for row in rows):
        return
    for group in _alike(rows, lambda row: row.plan.signals):
        names = rows[group[0]].plan.signals
        if not names:
            continue
        whole = len(group) == len(rows)
        x = torch.tensor([drafted[i].token for i in group], device=laws[0].device)
        raw = raws if raws is None or whole else raws[group]
        state = hidden if whole else hidden[group]
        law = None
        for name in names:
            one = SIGNALS[name]
            if law is None and one.reads("law"):
                law = torch.stack([laws[i] for i in group])
            values = one(law, raw, x, state).tolist()
            for i, value in zip(group, values, strict=True):
                drafted[i].signals[name] = value


def _facts(
    rows: Sequence[DraftRow],
    drafted: Sequence[Drafted],
    group: Sequence[int],
    hidden: Tensor,
    raws: Tensor | None,
    at_x: Mapping[int, Tensor],
) -> DraftStep:
    """The heads' inputs for a group of rows of a step, stacked."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=hidden.device)

    whole = len(group) == len(rows)
    return DraftStep(
        hidden if whole else hidden[group],
        raws if raws is None or whole else raws[group],
        column([rows[i].place for i in group]),
        column([drafted[i].token for i in group]),
        torch.stack([at_x[i] for i in group]) if group[0] in at_x else None,
        column([rows[i].plan.sampling.temperature for i in group]),
    )


_STATES = frozenset({"hidden", "hidden_x", "position", "temperature"})  # features that do not need a law
