"""Shared by the theory commands: --out, prompts, and a short probe of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sprinter.cli.pages import refuse_file
from sprinter.cli.progress import Progress
from sprinter.cli.prompts import read_text
from sprinter.errors import UserError
from sprinter.plots import check_plots

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.recording import Recording

__all__ = ["check_out", "read_prompts", "record"]

PROMPTS = (
    "The harbour of the old town lies at the mouth of the river, and its lighthouse was built in",
    "Once upon a time a small hedgehog found a red umbrella under the apple tree. She",
    "The council met on Tuesday to discuss the new railway line, which would connect the",
    "In biology, the term is used for a group of plants that",
    "The film was released in the spring of 1974 and was directed by",
    "The battle began at dawn when the first regiment crossed the bridge near",
    "He was born in a village in the north of the country, where his father",
    "The museum holds a large collection of paintings from the",
    "During the war the factory produced parts for aircraft, and after it",
    "The species lives in forests at an altitude of up to two thousand metres and feeds on",
    "The song reached number three in the charts and remained there for",
    "The earthquake struck on Sunday morning, and officials said that",
)
"""Prompts of the probe if the user gives none."""


def check_out(out: Path | None, figures: bool) -> None:
    """Check, before any work, that files can be written to --out and figures be drawn."""
    if out is None:
        return
    refuse_file(out)
    if figures:
        check_plots("give --no-figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --out '{out}' ({error.strerror}): give another directory") from None


def read_prompts(file: Path | None, texts: int) -> list[str]:
    """``texts`` prompts: the file's lines, else the built-in ones, repeated if there are too few."""
    lines: Sequence[str] = PROMPTS
    if file is not None:
        text = read_text(file, f"--prompts '{file}'", "a UTF-8 text, one prompt a line")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            raise UserError(f"--prompts '{file}' is empty: give one prompt a line")
    return [lines[i % len(lines)] for i in range(texts)]


def record(
    pair: Pair, prompts: Sequence[str], new_tokens: int, sampling: Sampling, seed: int, progress: Progress
) -> list[Recording]:
    """Run a short probe: texts of the target and of the draft for the same prompts, with both models' laws."""
    from sprinter.theory.recording import probe

    found = []
    for writer in ("target", "draft"):
        step = partial(progress, f"recording {len(prompts)} texts by the {writer}")
        found.append(
            probe(
                pair,
                prompts,
                writer=writer,
                new_tokens=new_tokens,
                sampling=sampling,
                seed=seed,
                progress=step,
            )
        )
    return found
