"""The kinds of trained heads: one row each, for the rules that read their scores and for the heads themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["HEAD_KINDS", "HeadKind"]


@dataclass(frozen=True, slots=True)
class HeadKind:
    """What a kind of head is for; its score is the signal of the same name, in [0, 1].

    Attributes:
        about: a sentence for model cards.
        sees_token: whether its features may include x itself. A kind that may not keeps rules blind to x.
    """

    about: str
    sees_token: bool = False


HEAD_KINDS: Mapping[str, HeadKind] = {
    "gate": HeadKind("A gate: may this draft token be kept without asking the target?"),
    "specdec++": HeadKind(
        "A stop rule (SpecDec++): the chance that the target accepts the drafted token.", sees_token=True
    ),
    "disco": HeadKind(
        "A stop rule (DISCO): the chance that the target accepts the drafted token, from the draft's law alone."
    ),
}
"""By the name that artifacts record as ``kind``."""
