"""Laws of a pair along texts that neither model wrote: teacher-forced, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sprinter.engine.pair import Pair
from sprinter.errors import UserError
from sprinter.laws import Sampling
from sprinter.models.checks import check_finite
from sprinter.models.choose import make_runner
from sprinter.models.interface import ModelOutput, Runner
from sprinter.models.pair import LoadedModel
from sprinter.theory.outcomes import FULL, condense_laws
from sprinter.theory.recording import RecordedText, Recording, join_texts, record_text

__all__ = ["Passage", "first_choices", "read_passages"]

CHUNK = 64
"""Positions at a time: bounds the memory, which is several laws a position."""


class Passage(NamedTuple):
    """A text whose laws are wanted at the positions of ``ids`` after ``prompt``, at least one token each."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]


@torch.inference_mode()
def read_passages(
    pair: Pair,
    passages: Sequence[Passage],
    *,
    sampling: Sampling = Sampling(),
    full: int = FULL,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Record both models' laws at the positions of each passage.

    Args:
        sampling: of the processed laws.
        full: vocabularies up to this size are recorded whole.
        progress: called with (passages done, passages).

    Raises:
        UserError: no draft, no passages. SprinterError: a model's logits are not finite.
    """
    if pair.models.draft is None:
        raise UserError("a probe reads the laws of both models, and this pair has no draft: give draft=...")
    if not passages:
        raise UserError("a probe needs at least one text")
    longest = max(len(passage.prompt) + len(passage.ids) for passage in passages)
    runners = [_runner(model, longest) for model in (pair.models.target, pair.models.draft)]
    texts = []
    for i, passage in enumerate(passages):
        texts.append(_join_parts(list(_read(pair, runners, passage, sampling, full)), passage))
        if progress is not None:
            progress(i + 1, len(passages))
    return join_texts(texts, pair, max(len(passage.ids) for passage in passages), "given")


def first_choices(recording: Recording) -> Tensor:
    """Whether the target's and the draft's most likely tokens are the same, bool ``[N]``."""
    laws = (recording.raw_p, recording.raw_q)
    if recording.outcomes is not None:  # a group of tokens is no choice
        laws = tuple(law.masked_fill(recording.outcomes < 0, -1.0) for law in laws)  # type: ignore[assignment]
    return laws[0].argmax(-1) == laws[1].argmax(-1)


def _runner(model: LoadedModel, longest: int) -> Runner:
    return make_runner(model.model, batch=1, max_len=longest)


def _read(
    pair: Pair, runners: Sequence[Runner], passage: Passage, sampling: Sampling, full: int
) -> Iterator[RecordedText]:
    """The passage's positions, ``CHUNK`` at a time."""
    text, first = [*passage.prompt, *passage.ids], len(passage.prompt)
    for runner in runners:
        runner.rewind([0])
        if first > 1:
            runner.extend(_row(text[: first - 1], runner), logits=False)
    for at in range(first, len(text), CHUNK):
        end = min(at + CHUNK, len(text))
        # from the token before the first position to the last one, whose state heads read
        read = [_extend(runner, text[at - 1 : end], at - 1) for runner in runners]
        logits = [step.logits[0, :-1] for step in read if step.logits is not None]
        for which, rows in zip(("target", "draft"), logits, strict=True):
            check_finite(rows[None], which, at)
        yield record_text(
            pair, sampling, text[:at], text[at:end], (logits[0], logits[1]), read[1].hidden[0],
            full, reduce=condense_laws,
        )  # fmt: skip


def _extend(runner: Runner, ids: Sequence[int], start: int) -> ModelOutput:
    runner.rewind([start])
    return runner.extend(_row(ids, runner))


def _row(ids: Sequence[int], runner: Runner) -> Tensor:
    return torch.tensor([list(ids)], device=runner.device)


def _join_parts(parts: Sequence[RecordedText], passage: Passage) -> RecordedText:
    """The parts of one passage as one text."""
    outcomes = [part.outcomes for part in parts if part.outcomes is not None]
    return RecordedText(
        laws=tuple(torch.cat([part.laws[i] for part in parts]) for i in range(4)),
        tokens=torch.cat([part.tokens for part in parts]),
        ids=passage.ids,
        prompt=passage.prompt,
        signals={name: torch.cat([part.signals[name] for part in parts]) for name in parts[0].signals},
        features={name: torch.cat([part.features[name] for part in parts]) for name in parts[0].features},
        outcomes=torch.cat(outcomes) if outcomes else None,
    )
