"""Drafters: who proposes. Trust, stop and accept do not care."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sprinter.decode.checks import at_least, ranged
from sprinter.decode.draft import Draft
from sprinter.decode.registry import DRAFTER, did_you_mean
from sprinter.decode.signals import one_hot_signals
from sprinter.errors import UserError
from sprinter.random import Draws, Purpose

__all__ = ["BUILT_IN", "Allocated", "Drafter", "Lookup", "Model", "Nothing", "copied", "look_up"]


class Drafter:
    """Who proposes. A driver knows how to serve each kind.

    Attributes:
        drafts: independent drafts a round.
    """

    drafts: int = 1

    @property
    def proposes(self) -> bool:
        """Whether there is ever a draft."""
        return True

    @property
    def uses_model(self) -> bool:
        """Whether the draft model may run."""
        return True

    def begin(self, draws: Draws) -> bool:
        """Whether there are drafts in the text that now begins."""
        return self.proposes


@DRAFTER.rule("nothing")
@dataclass(frozen=True, slots=True)
class Nothing(Drafter):
    """No draft: plain decoding with the target."""

    @property
    def proposes(self) -> bool:
        """Never."""
        return False

    @property
    def uses_model(self) -> bool:
        """No."""
        return False


@DRAFTER.rule("model")
@dataclass(frozen=True)
class Model(Drafter):
    """The draft model.

    Args:
        greedy: draft its first choice whatever the temperature (FSD drafts so); the law q is then one-hot.
        drafts: independent drafts a round, 1 to 8, for rules that choose among several.
    """

    greedy: bool = False
    drafts: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.greedy, bool):
            raise UserError(f"greedy={self.greedy} is out of range: give true or false")
        at_least("drafts", self.drafts, 1)
        if self.drafts > 8:
            raise UserError(f"drafts={self.drafts} is out of range: give a whole number in [1, 8]")


@DRAFTER.rule("allocated")
@dataclass(frozen=True, slots=True)
class Allocated(Drafter):
    """A share of the texts, chosen by chance, has the draft model's drafts, the others have none and are the target's
    (FSD, section 5.3, "random allocation").

    Args:
        share: chance that a text is drafted, in [0, 1].
    """

    share: float = 0.5

    def __post_init__(self) -> None:
        ranged(self, "share", 0.0, 1.0)

    @property
    def proposes(self) -> bool:
        """Not at share 0."""
        return self.share > 0

    @property
    def uses_model(self) -> bool:
        """Likewise."""
        return self.proposes

    def begin(self, draws: Draws) -> bool:
        """u < share, one number a text."""
        return draws.uniform(0, 0, Purpose.ALLOCATE) < self.share


@DRAFTER.rule("lookup")
@dataclass(frozen=True)
class Lookup(Drafter):
    """Prompt lookup: go on as the text went on after the last place where its ending stood before.

    The law of a looked-up token is one-hot, so every accept rule works; no model runs for it.

    Args:
        n: longest ending to look for, tokens; shorter ones down to ``least`` are tried in turn.
        least: shortest ending.
        otherwise: where nothing matches, "nothing" (plain decoding) or "model" (the draft model drafts).
    """

    n: int = 3
    least: int = 2
    otherwise: str = "nothing"

    def __post_init__(self) -> None:
        at_least("n", self.n, 1)
        at_least("least", self.least, 1)
        if self.least > self.n:
            raise UserError(f"least={self.least} is out of range: give at most n={self.n}")
        if self.otherwise not in ("nothing", "model"):
            raise did_you_mean("value of otherwise", str(self.otherwise), ["nothing", "model"])

    @property
    def uses_model(self) -> bool:
        """Where nothing matches, if asked to."""
        return self.otherwise == "model"


BUILT_IN: tuple[type[Drafter], ...] = (Model, Lookup, Allocated, Nothing)
"""The drafters that drivers know how to serve. They ask which of these it is, so no other class may stand in."""


def look_up(text: Sequence[int], n: int, least: int, at_most: int) -> list[int]:
    """Tokens that followed the latest earlier occurrence of the text's ending; [] if there is none.

    The copy may run into itself, so that a short cycle goes on for as long as is asked.
    """
    ids = np.asarray(text)
    for size in range(min(n, len(ids) - 1), least - 1, -1):
        ending = ids[-size:]
        starts = np.flatnonzero(ids[: len(ids) - size] == ending[0])
        for step in range(1, size):
            starts = starts[ids[starts + step] == ending[step]]
        if len(starts):
            source, found = int(starts[-1]) + size, list(text)
            for i in range(at_most):
                found.append(found[source + i])
            return [int(x) for x in found[len(text) :]]
    return []


def copied(
    tokens: Sequence[int],
    vocab: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    raw: bool = False,
) -> Draft:
    """Looked-up tokens as a proposal: one-hot laws ``[n, vocab]``, and the signals that such laws have."""
    n = len(tokens)
    laws = torch.zeros(n, vocab, dtype=dtype, device=device)
    if n:
        laws[range(n), list(tokens)] = 1.0
    sure = one_hot_signals(vocab)
    columns = {value: torch.full((n,), value, dtype=torch.float64) for value in set(sure.values())}
    signals = {name: columns[value] for name, value in sure.items()}
    return Draft(tuple(tokens), laws, signals, laws if raw else None)
