"""Drafters propose tokens. Trust, stop and accept rules do not depend on who proposes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sprinter.decode.checks import Parameters, count, flag, number
from sprinter.decode.draft import Draft
from sprinter.decode.grow import Independent, Root, TreeBuilder
from sprinter.decode.registry import DRAFTER
from sprinter.decode.sequence import Siblings
from sprinter.decode.signals import SIGNALS, read_signals, state_signals
from sprinter.decode.successors import Successors
from sprinter.decode.suffix_index import SuffixIndex
from sprinter.errors import SprinterError
from sprinter.random import Draws, Purpose

__all__ = [
    "NOTHING", "Allocated", "Context", "Drafter", "Model", "Nothing", "Proposal", "Proposals", "Proposer",
    "one_hot_rows",
]  # fmt: skip


class Proposal(NamedTuple):
    """The proposal of a drafter without the draft model: n tokens and the laws that they were drawn from.

    Attributes:
        tokens: token ids, at most ``Context.at_most``; an empty proposal calls the target at once.
        laws: ``[n, vocab]``; row i is the law that tokens[i] was drawn from, one-hot for a deterministic choice.
    """

    tokens: Sequence[int]
    laws: Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The input of a proposer.

    Attributes:
        text: token ids of the prompt, the new tokens and the current draft; must not be changed.
        round: the round's number, from 1; a draft run may take several proposals.
        at_most: maximum number of tokens to propose, at least 1.
        vocab: size of the vocabulary.
        draws: the only source of randomness: ``draws.token(law, round, position, Purpose.DRAFT)`` draws the token at
            ``position`` of the text.
        like: a tensor with the dtype and device that laws must have.
        states: by decoder layer in ``Drafter.target_states``, the target's hidden states of the text's tokens
            ``[read, d]``; ``read`` is at most the text's length. Empty for other drafters.
        earlier: earlier texts, which must change no token of this one; None: there are none.
        successors: what the target held most probable after each token, for drafters with ``recycles``.
    """

    text: Sequence[int]
    round: int
    at_most: int
    vocab: int
    draws: Draws
    like: Tensor
    states: Mapping[int, Tensor] = field(default_factory=dict)
    earlier: SuffixIndex | None = None
    successors: Successors | None = None

    def certain(self, tokens: Sequence[int]) -> Proposal:
        """A proposal of deterministically chosen tokens, with one-hot laws."""
        _check_ids(tokens, self.vocab)
        return Proposal(tokens, one_hot_rows(tokens, self.vocab, self.like))


class Proposer(ABC):
    """Proposes tokens for one text; may keep state between proposals, which must depend on the contexts alone."""

    @abstractmethod
    def propose(self, context: Context) -> Proposal | None:
        """Propose the next tokens of the draft run; None: the draft model, or heads, draft instead
        (``Drafter.uses_model``, ``Drafter.by_heads``)."""


class Drafter(Parameters):
    """Base class of drafters: the draft model drafts, unless ``proposer`` returns a factory of ``Proposer``.

    A drafter that grows trees with the draft model says how it makes ``siblings`` and defines ``growth`` and ``slots``.

    Attributes:
        drafts: independent drafts per round, all by the draft model.
        greedy: whether the draft model drafts argmax q at every temperature.
        tokens_a_pass: tokens that the draft model drafts in one pass, over masks if more than one (``parallel``).
        target_states: decoder layers of the target whose hidden states the proposer reads (-1: after the final norm).
        sure: heads that draft end before a token whose most probable choice has less probability.
    """

    drafts: int = 1
    greedy: bool = False
    tokens_a_pass: int = 1
    target_states: Sequence[int] = ()
    sure: float = 0.0

    @property
    def siblings(self) -> Siblings:
        """How it makes the nodes that follow one node: ``ALONE`` for chains."""
        return Siblings.ALONE if self.drafts == 1 else Siblings.INDEPENDENT

    @property
    def levels(self) -> int | None:
        """Number of levels of its trees, at most; None: as many as the stop rule allows."""
        return None

    def growth(self, root: Root) -> TreeBuilder:
        """A new tree; ``root.depth`` is its largest number of levels. By default that of independent drafts."""
        return Independent(root, self.drafts)

    def slots(self, depth: int) -> int:
        """Largest number of nodes of a tree of ``depth`` levels that either model reads."""
        return self.drafts * depth

    @property
    def proposes(self) -> bool:
        """Whether any text can have a draft."""
        return True

    @property
    def uses_model(self) -> bool:
        """Whether the draft model may run."""
        return True

    @property
    def by_heads(self) -> bool:
        """Whether heads on the target give the laws that the loop asks the draft model for (``decode.draft_heads``)."""
        return False

    @property
    def head_kind(self) -> str | None:
        """The kind that these heads must have; None: any."""
        return None

    @property
    def reads_states(self) -> bool:
        """Whether rules can read the draft model's states at the tokens that it drafts."""
        return self.proposer is None and not self.by_heads and self.tokens_a_pass == 1

    @property
    def reads_earlier(self) -> bool:
        """Whether the proposer reads earlier texts, or what was said after their tokens, if there are any."""
        return False

    @property
    def recycles(self) -> bool:
        """Whether the proposer reads what the target said after each token."""
        return False

    @property
    def needs_target(self) -> bool:
        """Whether the proposal can be empty, so that the target must write the next token."""
        return not self.proposes

    @property
    def proposer(self) -> Callable[[], Proposer] | None:
        """A factory that makes the proposer of a text; None: the draft model drafts every token."""
        return None

    def settle(self, accuracies: Sequence[Sequence[float]]) -> Drafter:
        """The drafter with what heads that draft record in place of "recorded"; ``accuracies`` as in ``DraftHeads``."""
        return self

    def begin(self, draws: Draws) -> bool:
        """Whether to draft in the text that now begins."""
        return self.proposes


@DRAFTER.rule("nothing")
@dataclass(frozen=True, slots=True)
class Nothing(Drafter):
    """Drafts nothing: plain decoding with the target."""

    proposes: ClassVar[bool] = False  # every token is the target's
    uses_model: ClassVar[bool] = False  # no draft model is needed


NOTHING = Nothing()
"""Of chains of drafters: the target decodes where none drafts."""


@DRAFTER.rule("model")
@dataclass(frozen=True)
class Model(Drafter):
    """The draft model drafts.

    Args:
        greedy: draft argmax q at every temperature, as FSD does; the law q is then one-hot.
        drafts: independent drafts per round, 1 to 8, for accept rules that choose among several.
    """

    greedy: bool = flag(False)
    drafts: int = count(1, 1, 8)


@DRAFTER.rule("allocated")
@dataclass(frozen=True, slots=True)
class Allocated(Drafter):
    """The draft model drafts in a random share of the texts; the target decodes the others alone (FSD, section 5.3,
    "random allocation").

    Args:
        share: probability that a text is drafted, in [0, 1].
    """

    share: float = number(0.5, 0.0, 1.0)
    needs_target: ClassVar[bool] = True  # the target decodes the texts that are not drafted

    @property
    def proposes(self) -> bool:
        """Whether share > 0."""
        return self.share > 0

    @property
    def uses_model(self) -> bool:
        """Whether share > 0: the draft model runs in the texts that are drafted."""
        return self.proposes

    def begin(self, draws: Draws) -> bool:
        """u < share, with one random number per text."""
        return draws.uniform(0, 0, Purpose.ALLOCATE) < self.share


def one_hot_rows(tokens: Sequence[int], vocab: int, like: Tensor) -> Tensor:
    """One-hot laws ``[n, vocab]`` of tokens, with the dtype and device of ``like``."""
    laws = like.new_zeros(len(tokens), vocab)
    if tokens:
        laws[range(len(tokens)), list(tokens)] = 1.0
    return laws


class Proposals:
    """The proposals of one text, as a driver asks for them.

    Once a proposer has left a proposal to the draft model, the rest of that draft run is the model's: what is drafted
    ahead must not change who drafts.

    Args:
        drafter: a drafter with a ``proposer``.
    """

    def __init__(self, drafter: Drafter) -> None:
        assert drafter.proposer is not None
        self._drafter, self._proposer = drafter, drafter.proposer()
        self._model_round = 0  # the last round in which the model drafted

    @classmethod
    def of(cls, drafter: Drafter) -> Proposals | None:
        """The proposals of a new text; None if the draft model drafts every token."""
        return None if drafter.proposer is None else cls(drafter)

    def ask(self, context: Context) -> Proposal | None:
        """The next proposal; None: the draft model drafts.

        Raises:
            SprinterError: more tokens than were asked for, ids or laws that do not fit the vocabulary, None from a
                drafter that uses no model, or nothing from one that says it always proposes.
        """
        drafter = self._drafter
        if context.round == self._model_round:
            return None
        proposal = self._proposer.propose(context)
        if proposal is None:
            if not (drafter.uses_model or drafter.by_heads):
                raise SprinterError(
                    f"{drafter} left a proposal to the draft model, and says that it uses none (uses_model)"
                )
            self._model_round = context.round
            return None
        n, laws = len(proposal.tokens), proposal.laws
        if n > context.at_most or laws.shape != (n, context.vocab):
            raise SprinterError(
                f"the drafter proposed {n} tokens with laws of shape {list(laws.shape)}; it was asked for at most "
                f"{context.at_most} tokens, with laws [tokens, {context.vocab}]"
            )
        _check_ids(proposal.tokens, context.vocab)
        if n == 0 and not drafter.needs_target:
            raise SprinterError(
                f"{drafter} proposed nothing, and says that it always proposes (needs_target)"
            )
        return proposal

    def draft(self, context: Context, signals: Set[str], raw: bool) -> Draft | None:
        """``ask`` as a driver's answer, with the signals that the rules read.

        Args:
            signals: names of signals; those of ``SIGNALS`` are computed. raw: whether the accept rule reads raw laws.
        """
        proposal = self.ask(context)
        if proposal is None:
            return None
        tokens, laws = tuple(proposal.tokens), proposal.laws
        names = signals & SIGNALS.keys() - state_signals() if signals else signals
        read = read_signals(names, laws, laws, torch.tensor(tokens, device=laws.device)) if names else {}
        values = {name: each.to("cpu", torch.float64) for name, each in read.items()}
        return Draft(tokens, laws, values, laws if raw else None, proposed=True)


def _check_ids(tokens: Sequence[int], vocab: int) -> None:
    if outside := [id for id in tokens if not 0 <= id < vocab]:
        raise SprinterError(
            f"the drafter proposed token id {outside[0]}, and the vocabulary has {vocab} tokens"
        )
