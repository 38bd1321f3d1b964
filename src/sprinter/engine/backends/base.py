"""What backends are asked and what they answer.

A backend runs one model over rows. It has four verbs, each for some rows together: ``read`` (prefill), ``draft`` (draft
steps), ``tips`` (a level of a tree) and ``score`` (a target pass). Rows have their own sampling, draws and positions,
and their results do not depend on other rows, except for rounding in the models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from sprinter.decode.adjust import Adjust
from sprinter.decode.draft import AskGrammar, Ranked, Scores
from sprinter.decode.run_rules import RunRules
from sprinter.decode.signals import SIGNALS
from sprinter.heads.head import Head
from sprinter.laws import Sampling
from sprinter.random import Draws

__all__ = [
    "FINAL", "After", "ChainRow", "DraftPlan", "DraftRow", "Drafted", "DraftedChain", "GreedyScores", "PassInput",
    "PassOutput", "PromptRead", "PromptRow", "RowInput", "Scored", "StepResult", "TargetRow", "TipLaws", "TreeRow",
]  # fmt: skip

FINAL = -1
"""In place of a decoder layer's number: the hidden states after the final norm."""
After = tuple[Tensor, Tensor]
"""Output of a model after a text: logits ``[V]`` and hidden state ``[d]``."""


class RowInput(NamedTuple):
    """Input of a row: ``tokens``, at least one, after the first ``start`` that it holds; later ones are discarded.

    ``parents``: of the last tokens, which are nodes of a tree: the number of each one's parent in the tree, -1 for the
    text; ``root``: slot of the tree's first node. None: each token follows the previous one.
    """

    row: int
    start: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    root: int = 0

    @property
    def slots(self) -> list[int] | None:
        """The slot that each token follows, as ``Runner.extend`` takes it; None for a chain."""
        if self.parents is None:
            return None
        chain = len(self.tokens) - len(self.parents)
        return [*range(self.start - 1, self.start - 1 + chain), *(self.root + one for one in self.parents)]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A chunk of a prompt's prefill in the row of a model, "target" or "draft"; ``layers``: whose states to return."""

    model: str
    feed: RowInput
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Time of a prefill chunk in seconds, and hidden states ``[n, d]`` of each of the row's layers.

    ``copied``: number of its tokens that another row read in the same step.
    """

    seconds: float
    states: Sequence[Tensor] = ()
    copied: int = 0


_STATES = frozenset({"hidden", "hidden_x", "position", "temperature"})  # features that do not need a law


@dataclass(frozen=True, slots=True, eq=False)
class DraftPlan:
    """The settings that all draft steps of a request share.

    Attributes:
        sampling: temperature and truncation of the processed law.
        signals: names of ``sprinter.decode.signals.SIGNALS`` that the rules read.
        heads: by kind, those that the rules read.
        raw: whether the answer must contain raw laws (temperature 1, no truncation).
        needs_raw: whether they are computed.
        reads_x: whether a head reads the hidden state at x; the step then runs the model on x too.
        captures: whether the step can be captured.
        columns: names of the numbers of a step: "peak", signals, kinds of heads.
        key: what follows a pass is the same for rows whose plans have the same key.
    """

    sampling: Sampling
    signals: tuple[str, ...] = ()
    heads: Mapping[str, Head] = field(default_factory=dict)
    raw: bool = False

    needs_raw: bool = field(init=False)
    reads_x: bool = field(init=False)
    captures: bool = field(init=False)
    columns: tuple[str, ...] = field(init=False)
    key: tuple[Hashable, ...] = field(init=False)

    def __post_init__(self) -> None:
        read = {feature for head in self.heads.values() for feature in head.features}
        signals = [SIGNALS[name] for name in self.signals]
        reads_x, never = "hidden_x" in read, any(one.capture == "never" for one in signals)
        by_signals = any(one.reads("raw") for one in signals)
        object.__setattr__(self, "needs_raw", self.raw or by_signals or not _STATES.issuperset(read))
        object.__setattr__(self, "reads_x", reads_x)
        object.__setattr__(self, "captures", not (reads_x or never))
        object.__setattr__(self, "columns", ("peak", *self.signals, *self.heads))
        object.__setattr__(self, "key", (self.columns, *self.heads.values(), self.raw))


class ChainRow(NamedTuple):
    """The target pass that follows a draft run in any case: over ``feed``, which is what it has not read of the text,
    and the drafted tokens, which ``rule`` ("exact" or "match") judges. ``sampling``, ``raw``: as of ``TargetRow``.
    ``trusts``: whether the first of them may be trusted."""

    feed: RowInput
    sampling: Sampling
    raw: bool
    rule: str
    trusts: bool = False


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """A draft that the target judges: the last ``tokens`` of its input, from ``position`` of the text on.

    Attributes:
        laws: ``[n, V]`` each, that they were drawn from, in parts. trusted: number of the first tokens that stay.
        rule, draws, round: as of ``ChainRow`` and ``DraftRow``.
    """

    rule: str
    tokens: Sequence[int]
    laws: Sequence[Tensor]
    position: int
    trusted: int
    draws: Draws
    round: int


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
        rules: end the run before ``count`` tokens, in a backend that can ask them.
        chain: what the target will be asked then; a backend may answer that too.
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
    rules: RunRules | None = None
    chain: ChainRow | None = None


@dataclass(slots=True)
class Drafted:
    """What a row drafted: n tokens, at least one, ``count`` at most.

    Attributes:
        laws: ``[n, V]`` that they were drawn from. raws: raw laws, or None.
        signals: by name, signals and scores of heads, float64 ``[n]`` on the CPU.
        passes: number of forward passes of the row, and ``read`` the number of tokens that it read in them.
        after: the model's output after the last token, if it ran on it.
        draft_s, gate_s: the row's share of the time, in seconds: without the heads, and of the heads.
        scored: of the row's ``chain``, if its target pass has run.
    """

    tokens: list[int]
    laws: Tensor
    raws: Tensor | None
    signals: dict[str, Tensor]
    passes: int
    read: int
    after: After | None
    draft_s: float
    gate_s: float
    scored: Scored | None = None


@dataclass(slots=True)
class TreeRow:
    """One row of a draft step of a tree.

    Attributes:
        feed: the text's unread tokens, or the tips.
        count: number of tips, the last tokens of the feed.
        plan: as of ``DraftRow``. laws, top: as in ``AskTips``.
        adjust: adjusts the logits after the tips.
        bare: whether the logits themselves are wanted, and nothing else.
    """

    feed: RowInput
    count: int
    plan: DraftPlan
    laws: bool = False
    top: int = 0
    adjust: Adjust | None = None
    bare: bool = False


@dataclass(slots=True)
class TipLaws:
    """What ``TreeRow`` asks for, at each tip: laws and raw laws ``[tips, V]``, the most probable tokens, signals; or
    logits ``[tips, V]``.

    ``draft_s``: the row's time in seconds.
    """

    laws: Tensor | None
    raws: Tensor | None
    top: list[Ranked]
    signals: dict[str, Tensor]
    draft_s: float
    logits: Tensor | None = None


@dataclass(slots=True)
class TargetRow:
    """One row of a target forward pass: ``feed`` holds its unread tokens. ``raw``: whether to return raw laws too.

    ``layers``: decoder layers whose hidden states to return, or ``FINAL``. ``adjust``: adjusts the logits of the feed.
    ``draw``: (draws, round, position) of a token to draw after the last one; None: the loop draws. ``chain``: a draft
    that a backend may judge; None: the loop does. ``drafted``: number of draft tokens at the
    end of the feed that a backend may judge by the most probable tokens alone; 0: the loop judges.
    """

    feed: RowInput
    sampling: Sampling
    raw: bool = False
    layers: tuple[int, ...] = ()
    adjust: Adjust | None = None
    draw: tuple[Draws, int, int] | None = None
    chain: DraftedChain | None = None
    drafted: int = 0


@dataclass(slots=True)
class Scored:
    """The target's laws after each token of a row, ``[n, V]`` or what makes them, and the row's share of the time in
    seconds.

    ``states``: hidden states ``[n, d]`` of each of the row's ``layers``. ``token``: the one to ``draw``. ``spent``:
    what the row asked of a target on a server. Of a chain: ``trusted``, number of its first tokens, which are not
    judged; ``accepted``, number of the others that stay, and ``token`` follows; ``metered``: by position, drift and
    ratio of tokens that are trusted. ``likeliest``: the most probable tokens, where laws are to be made.
    """

    laws: Tensor | Callable[[], Tensor]
    raw: Tensor | None
    target_s: float
    states: Sequence[Tensor] = ()
    token: int | None = None
    spent: Mapping[str, int] | None = None
    accepted: int | None = None
    trusted: int = 0
    metered: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    likeliest: Sequence[int] = ()


class GreedyScores(Scores):
    """Scores of a greedy request, with the verdict on its draft. Most rounds read no law, so laws are made where they
    are read."""

    __slots__ = ("_likeliest", "_made")

    def __init__(
        self,
        make: Callable[[], Tensor],
        likeliest: Sequence[int],
        token: int | None,
        accepted: int | None = None,
    ) -> None:
        self.raw, self.heads, self.token, self.accepted, self.metered = None, {}, token, accepted, {}
        self._made: Tensor | Callable[[], Tensor] = make
        self._likeliest = likeliest

    @property
    def laws(self) -> Tensor:  # type: ignore[override]
        """As above."""
        if not isinstance(self._made, Tensor):
            self._made = self._made()
        return self._made

    @property
    def likeliest(self) -> Sequence[int]:
        """As above, without a law."""
        return self._likeliest


PassInput = PromptRow | DraftRow | TreeRow | TargetRow | AskGrammar
"""What a request asks of the models, or of its grammar."""
PassOutput = PromptRead | Drafted | TipLaws | Scored | Sequence[int] | int | Exception
"""What they made of it; an exception concerns this request alone."""


class StepResult(NamedTuple):
    """What follows a draft pass: tokens ``[rows]``, laws and raw laws ``[rows, V]``, numbers ``[rows, columns]``.

    The columns of ``numbers``, float64 where there are several, are named by ``DraftPlan.columns``. A captured step
    returns these fields.
    """

    token: Tensor
    law: Tensor
    raw: Tensor
    numbers: Tensor
