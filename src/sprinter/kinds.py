"""The kinds of trained heads: for the rules and drafters that read them, and for the heads themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["DRAFTING_KINDS", "HEAD_KINDS", "HeadKind"]

DRAFTING_KINDS = ("medusa", "eagle", "eagle3", "glide", "peagle", "dflash", "mtp")
"""Kinds of heads on the target that draft; "peagle" is EAGLE-3's with all tokens in one pass, "dflash" a
block-diffusion model, "mtp" the multi-token prediction that the target's own checkpoint holds."""


@dataclass(frozen=True, slots=True)
class HeadKind:
    """What a kind of head is for; its score is in [0, 1], for a head on the draft the signal of the same name.

    Attributes:
        about: a sentence for model cards.
        sees_token: whether its features may include x itself. A kind that may not keeps rules blind to x.
        model: the model whose hidden states it reads. Trust and stop rules read heads of the draft, accept rules heads
            of the target.
    """

    about: str
    sees_token: bool = False
    model: Literal["draft", "target"] = "draft"


HEAD_KINDS: Mapping[str, HeadKind] = {
    "gate": HeadKind("A gate: may this draft token be kept without asking the target?"),
    "specdec++": HeadKind(
        "A stop rule (SpecDec++): the chance that the target accepts the drafted token.", sees_token=True
    ),
    "disco": HeadKind(
        "A stop rule (DISCO): the chance that the target accepts the drafted token, from the draft's law alone."
    ),
    "judge": HeadKind(
        "An accept rule (AutoJudge): the chance that a token which the target would not have written leaves the answer "
        "as it is.",
        sees_token=True,
        model="target",
    ),
    "diversed": HeadKind(
        "An accept rule (DIVERSED): how far the draft may replace the target after this prefix, 0 to 1.",
        model="target",
    ),
}
"""By the name that artifacts record as ``kind``."""
