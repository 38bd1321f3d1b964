"""Heads on the target that draft, and draft models that draft several tokens in one pass: what they give, and what is
made of it.

The loop asks for a draft (``AskDraft``) or for laws where a tree grows (``AskTips``) and does not know who answers. A
driver answers from the draft model, or, if the drafter is ``heads`` or ``parallel``, from a ``HeadDrafts``, which holds
one text. So every stop rule, tree and accept rule that works on the draft model's laws works on theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from sprinter.decode.adjust import Adjuster
from sprinter.decode.checks import count, number
from sprinter.decode.draft import AskDraft, AskTips, Draft, Tips
from sprinter.decode.drafter import NOTHING, Allocated, Drafter, Model
from sprinter.decode.grow import Root, TreeBuilder, ranked
from sprinter.decode.registry import DRAFTER, did_you_mean
from sprinter.decode.sequence import Siblings, TokenSequence
from sprinter.decode.signals import SIGNALS, read_signals
from sprinter.errors import SprinterError, UserError
from sprinter.kinds import DRAFTING_KINDS
from sprinter.laws import Sampling, process, raw_law
from sprinter.random import Draws, Purpose

__all__ = ["BlockText", "Blocks", "DraftHeads", "HeadDrafts", "HeadText", "Heads", "Parallel"]


class HeadText(Protocol):
    """The heads in one text.

    Attributes:
        steps: number of forward passes of the heads so far. tokens: that they read.
    """

    steps: int
    tokens: int

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Go to a text: what follows it is drafted next.

        Args:
            text: n >= 2 token ids.
            states: by layer of ``DraftHeads.layers``, the target's states ``[n − 1, d]`` of all but the last one.
        """
        ...

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        """Logits of the token after the text and each of some paths.

        Args:
            paths: tokens from the text to m nodes of one level; the path without its last token was asked for before.

        Returns:
            ``[m, V]``, or ``[1, V]`` if they are the same for all; None if the heads do not reach as far.
        """
        ...


class DraftHeads(Protocol):
    """Heads on the target that draft.

    Attributes:
        kind: one of ``DRAFTING_KINDS``.
        layers: decoder layers of the target whose hidden states they read, from 0; -1: after the final norm.
        accuracies: by number of tokens ahead, the share of held-out positions at which the target's token had rank
            0, 1, ... among those that the heads find most probable; (): not measured.
    """

    kind: str
    layers: tuple[int, ...]
    accuracies: Sequence[Sequence[float]]

    @property
    def flops(self) -> float:
        """FLOPs of a step over one token."""
        ...

    def begin(self) -> HeadText:
        """A new text."""
        ...


@dataclass(frozen=True)
class _Grown(Drafter):
    """Laws that do not come from steps of the draft model, and the drafter that makes chains or trees of them."""

    grow: Drafter | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self._own
        fits = isinstance(own, Drafter) and own.uses_model and own.proposer is None
        if not fits or isinstance(own, Allocated | _Grown):
            raise UserError(
                f"grow={own} is out of range: give a drafter that reads a draft model's laws, such as static or dynamic"
            )
        object.__setattr__(self, "drafts", own.drafts)
        object.__setattr__(self, "greedy", own.greedy)

    @property
    def _own(self) -> Drafter:
        return Model() if self.grow is None else self.grow

    @property
    def siblings(self) -> Siblings:
        """Those of ``grow``."""
        return self._own.siblings

    @property
    def levels(self) -> int | None:
        """Those of ``grow``."""
        return self._own.levels

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree."""
        return self._own.growth(root)

    def slots(self, depth: int) -> int:
        """Those of ``grow``."""
        return self._own.slots(depth)

    def settle(self, accuracies: Sequence[Sequence[float]]) -> Self:
        """With the tree that the accuracies of heads choose, if it is to be chosen."""
        own = self._own.settle(accuracies)
        return self if own == self._own else replace(self, grow=own)


@DRAFTER.rule("heads")
@dataclass(frozen=True)
class Heads(_Grown):
    """Heads on the target draft in place of a draft model, or before it: Medusa's, EAGLE's, GliDe's, DFlash's, its
    checkpoint's.

    Args:
        grow: the drafter that reads their laws: ``model(greedy=true)``, or one that grows trees (static, dynamic,
            sparse, drawn, widened, ``model(drafts=2)``). None: a chain, each token drawn from its law.
        kind: that the pair's heads must have, "mtp" for example; None: any.
        otherwise: who goes on in a round where the heads end: the draft model, which also says whether both draft
            greedily, or "nothing". Chains alone.
        sure: the heads end before a token whose most probable choice has less probability at temperature 1.
    """

    kind: str | None = None
    otherwise: Drafter = NOTHING
    sure: float = number(0.0, 0.0, 1.0)
    by_heads: ClassVar[bool] = True
    needs_target: ClassVar[bool] = True  # the heads read its states, and may have no more to say

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind is not None and self.kind not in DRAFTING_KINDS:
            raise did_you_mean("kind of heads that draft", str(self.kind), DRAFTING_KINDS)
        if self.otherwise == NOTHING:
            return
        if not isinstance(self.otherwise, Model) or self.otherwise.drafts > 1 or self.grow is not None:
            raise UserError(
                f"otherwise={self.otherwise} is out of range: give model, or model(greedy=true), without grow="
            )
        object.__setattr__(self, "greedy", self.otherwise.greedy)

    @property
    def uses_model(self) -> bool:
        """Whether the draft model goes on where the heads end."""
        return self.otherwise.uses_model

    @property
    def head_kind(self) -> str | None:
        """``kind``."""
        return self.kind


@DRAFTER.rule("parallel")
@dataclass(frozen=True)
class Parallel(_Grown):
    """The draft model drafts several tokens in one pass (PARD, An et al. 2025): masks stand for all but the first.

    Each law depends on the text before the pass alone, so that a chain's q is their product.

    Args:
        grow: as in ``heads``.
        tokens: of a pass, 2 to 64.
    """

    tokens: int = count(8, 2, 64)

    @property
    def tokens_a_pass(self) -> int:  # type: ignore[override]
        """``tokens``."""
        return self.tokens

    @property
    def levels(self) -> int | None:
        """Those of ``grow``, at most ``tokens``."""
        own = self._own.levels
        return self.tokens if own is None else min(own, self.tokens)


class BlockText:
    """What one pass of a draft model over masks says of the tokens to come, as a ``HeadText``.

    Args:
        mask: the token that stands for those to come. most: tokens of a pass.
    """

    steps = tokens = 0  # they are counted where the pass runs

    def __init__(self, mask: int, most: int) -> None:
        self.mask, self.most = mask, most
        self._round = self._start = self._depth = 0
        self._logits: Tensor | None = None

    def take(self, sequence: TokenSequence, logits: Tensor) -> None:
        """Take the logits ``[k, V]`` of the k tokens that follow a sequence."""
        self._round, self._start, self._logits = sequence.round, len(sequence), logits

    def answers(self, ask: AskDraft | AskTips) -> bool:
        """Whether a request needs no further pass: a tree has grown, or a chain is shorter than the last pass of its
        round reaches."""
        if isinstance(ask, AskTips) and ask.nodes:
            return True
        known = 0 if self._logits is None or self._round != ask.sequence.round else len(self._logits)
        return 0 <= len(ask.sequence) - self._start < known

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """See ``HeadText``."""
        self._depth = len(text) - self._start

    def logits(self, paths: Sequence[tuple[int, ...]]) -> Tensor | None:
        """See ``HeadText``."""
        depth = self._depth + len(paths[0])
        return None if self._logits is None or depth >= len(self._logits) else self._logits[depth : depth + 1]


class Blocks:
    """A draft model that drafts in one pass, as ``DraftHeads``; its passes run, and are counted, where the model is.

    Args:
        mask, most: as in ``BlockText``.
    """

    kind = "parallel"
    layers: tuple[int, ...] = ()
    accuracies: Sequence[Sequence[float]] = ()
    flops = 0.0

    def __init__(self, mask: int, most: int) -> None:
        self.mask, self.most = mask, most

    def begin(self) -> BlockText:
        """A new text."""
        return BlockText(self.mask, self.most)


class HeadDrafts:
    """Drafts of heads in one text: a chain's tokens with their laws, or laws at the tips of a tree.

    Args:
        heads: of this text.
        sampling: of the laws that tokens are drawn from; a greedy drafter's are one-hot.
        draws: of this text.
        signals: names of signals that rules read; those of the heads' laws are computed.
        raw: whether raw laws are needed.
        vocab: size of the common vocabulary; logits beyond it are dropped.
        adjust: adjusts the heads' logits to the text; None: nothing does.
        kind: of the heads, for messages.
        drafter: the method's: how sure the heads must be, and whether the draft model goes on where they end.

    Attributes:
        heads: as given.
        paths: tokens from the text to each of the tips that have laws, of those that ``tips`` was last asked about.
    """

    def __init__(
        self,
        heads: HeadText,
        sampling: Sampling,
        draws: Draws,
        signals: Sequence[str],
        raw: bool,
        vocab: int,
        adjust: Adjuster | None = None,
        kind: str = "drafting",
        drafter: Drafter = NOTHING,
    ) -> None:
        self._kind, self._sure = kind, drafter.sure
        self._hands_over = drafter.by_heads and drafter.uses_model
        self._ended = 0  # the last round in which a draft of the heads ended
        self.heads = heads
        self._sampling, self._draws, self._raw, self._vocab = sampling, draws, raw, vocab
        self._signals = [name for name in signals if name in SIGNALS]
        self._adjust = adjust
        self.paths: Sequence[tuple[int, ...]] = ()
        self._began = False  # whether the heads were told of a text
        self._tail: tuple[int, ...] = ()  # tokens of the text beyond those that the heads were told of

    @property
    def counts(self) -> tuple[int, int]:
        """Number of forward passes of the heads so far, and of tokens that they read."""
        return self.heads.steps, self.heads.tokens

    def left_to_model(self, round: int) -> bool:
        """Whether the rest of a round's draft is the draft model's, whatever the heads would know later in it."""
        return self._hands_over and self._ended == round

    def read(self, text: Sequence[int], states: Mapping[int, Tensor]) -> None:
        """Go to a text, before its draft begins.

        Args:
            text: token ids. states: by layer, the target's states ``[read, d]`` of all of them, or of the first.
        """
        if self._adjust is not None:
            self._adjust.follow(text)
        # Without states all is read; else what the target has read, and the token that it wrote.
        known = min([len(text) - 1, *(len(each) for each in states.values())])
        # Tokens that the target has not read, the first of them apart, are steps of the heads' own.
        self._tail, self._began = tuple(text[known + 1 :]), known > 0 or not states
        if self._began:
            self.heads.read(text[: known + 1], {layer: each[:known] for layer, each in states.items()})

    def draft(self, request: AskDraft, wanted: int) -> Draft:
        """Draw at most ``wanted`` tokens, one after the other; fewer where the heads do not reach as far."""
        tokens: list[int] = []
        laws: list[Tensor] = []
        raws: list[Tensor] = []
        text, round = request.sequence.tokens, request.sequence.round
        while len(tokens) < min(wanted, request.at_most):
            found = self._laws(len(text), [tuple(tokens)])
            if found is None:
                break
            law, raw, _, _ = found
            laws.append(law[0])
            raws.append(raw[0])
            tokens.append(self._draws.token(law[0], round, len(text) + len(tokens), Purpose.DRAFT))
        if not tokens:
            self._ended = round
            empty = torch.zeros(0, self._vocab)
            return Draft(
                (), empty, {name: torch.zeros(0) for name in self._signals}, empty if self._raw else None
            )
        q, raw = torch.stack(laws), torch.stack(raws)
        read = (
            read_signals(self._signals, q, raw, torch.tensor(tokens, device=q.device))
            if self._signals
            else {}
        )
        values = {name: each.to("cpu", torch.float64) for name, each in read.items()}
        return Draft(tuple(tokens), q, values, raw if self._raw else None)

    def tips(self, request: AskTips) -> Tips:
        """The laws at the newest tips of a tree."""
        paths = request.paths
        found = self._laws(len(request.sequence), paths)
        if found is None:
            self.paths = ()
            return Tips(ended=True)
        law, raw, adjusted, reached = found
        if reached is not None:
            paths = [paths[i] for i in reached]
        self.paths = paths
        values: dict[str, Tensor] = {}
        names = [name for name in self._signals if not SIGNALS[name].reads("token")]
        if names:
            read = read_signals(names, law, raw)
            values = {name: _each(each.to("cpu", torch.float64), len(paths)) for name, each in read.items()}
        top = ranked(adjusted.log_softmax(-1), request.top)
        return Tips(
            list(_each(law, len(paths))) if request.laws else (),
            top * (len(paths) // max(1, len(top))),
            values,
            list(_each(raw, len(paths))) if self._raw else (),
            reached=reached,
        )

    def _laws(
        self, position: int, paths: Sequence[tuple[int, ...]]
    ) -> tuple[Tensor, Tensor, Tensor, list[int] | None] | None:
        """Processed laws, raw laws and adjusted logits after some paths from a position of the text, ``[m, V]`` or
        ``[1, V]`` each.

        Heads of a reduced vocabulary can draft no token where all that they know are forbidden, and are not asked for
        one where they are less sure than they must be: they do not reach as far there. That depends on the tokens up
        to there alone, so that drafts stay exact.

        Returns:
            Laws, raw laws, logits, and the numbers of the paths that they are about, None: all. None if there are none.

        Raises:
            SprinterError: logits are NaN or +inf.
        """
        whole = [(*self._tail, *path) for path in paths]
        logits = self.heads.logits(whole) if self._began else None
        if logits is None:
            return None
        logits = logits[..., : self._vocab]
        peaks = self._peaks(logits, position + len(paths[0]))
        raw = raw_law(logits)
        if self._adjust is not None:
            logits = self._adjust.after(paths)(_each(logits, len(paths)))
            raw = _each(raw, len(paths))
            peaks = logits.amax(-1).tolist()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        reached = None
        if self._sure:
            chances = raw.amax(-1).tolist()
            peaks = [
                peak if chance >= self._sure else -torch.inf
                for peak, chance in zip(peaks, chances, strict=True)
            ]
        if min(peaks) == -torch.inf:
            reached = [i for i, peak in enumerate(peaks) if peak > -torch.inf]
            if not reached:
                return None
            logits, raw = logits[reached], raw[reached]
        return process(logits, self._sampling), raw, logits, reached

    def _peaks(self, logits: Tensor, position: int) -> list[float]:
        """The largest logit of each row, none of them NaN or +inf."""
        peaks: list[float] = logits.amax(-1).tolist()
        worst = next((peak for peak in peaks if isnan(peak) or peak == torch.inf), None)
        if worst is not None:
            raise SprinterError(
                f"the {self._kind} heads' logits are {'NaN' if isnan(worst) else '+inf'} at position {position}: check "
                "their weights, and try dtype=float32"
            )
        return peaks


def _each(values: Tensor, count: int) -> Tensor:
    """One row for each of some paths, of values that may have one row for all."""
    return values.expand(count, *values.shape[1:])
