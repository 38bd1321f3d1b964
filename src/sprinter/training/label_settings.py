"""Settings of labelling; the command line reads them before it imports torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from sprinter.decode.checks import one_of
from sprinter.errors import UserError
from sprinter.parameters import (
    LISTED,
    Natural,
    Positive,
    RealNumber,
    Sampling,
    WholeNumber,
    checked,
    like,
    stated,
)
from sprinter.training.sources import ReadingSettings

__all__ = ["CPU_BATCH", "GPU_BATCH", "KINDS", "LabelSettings"]

CPU_BATCH, GPU_BATCH = 16, 128
"""Usual texts per step: a step is what an interrupted run loses, and on a CPU 128 texts may take many minutes."""
KINDS = ("original", "draft", "target", "interleaved")
"""Prefix classes, by whose index ``Records.kind`` has them: the last interleaves draft and target."""


@checked
class LabelSettings(ReadingSettings):
    """What the records depend on, besides pair and data."""

    seed: WholeNumber = stated(
        0, "The same seed gives the same records. Seed of the completions and of the drawn x."
    )
    temperature: RealNumber = like(
        Sampling.model_fields["temperature"],
        description="Temperature of the completions; labels have their own. These and laws are raw (temperature 1).",
    )
    prompt_share: Annotated[RealNumber, Field(ge=0, le=1)] = stated(
        0.3, "Share of a running text's words used as prompt."
    )
    prompt_tokens: Natural = stated(
        128, "Maximum prompt length of running text; longer prompts are truncated. 0: none is, and prompts that do not "
        "fit are skipped."
    )  # fmt: skip
    new_tokens: Positive = stated(20, "Labelled positions per text.")
    classes_per_prompt: WholeNumber = stated(
        1, "Prefix classes per prompt: 1: the next one of them; 4: all of them."
    )
    batch_size: Positive = stated(
        GPU_BATCH, "Texts per step; each step is a shard, and an interrupted run loses one step. Both models' logits "
        "of at most 2 GiB are held at once: a step that needs more runs in several parts.",
    )  # fmt: skip
    classes: Annotated[tuple[str, ...] | None, LISTED] = stated(
        None, "Prefix classes to label: original, draft, target, interleaved; target,draft: only answers that the "
        "models write themselves. None: all four. A prompt without an answer has no text of class original.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.classes_per_prompt not in (1, len(KINDS)):
            raise UserError(
                f"classes_per_prompt={self.classes_per_prompt} is out of range: give 1 (in turn) or {len(KINDS)} (all)"
            )
        if self.classes is not None and len(set(self.classes)) < max(1, len(self.classes)):
            raise UserError(
                f"classes={self.classes!r} is not a list of different classes: give some of {', '.join(KINDS)}"
            )
        for name in self.classes or ():
            one_of("prefix class", name, KINDS)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The prefix classes to label, as indices into ``KINDS``."""
        return tuple(KINDS.index(name) for name in self.classes or KINDS)
