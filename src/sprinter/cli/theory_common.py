"""Shared by the theory commands: progress, files, prompts, and a short probe of a pair."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.plots import check_plots

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair
    from sprinter.laws import Sampling
    from sprinter.theory.recording import Recording

__all__ = ["PROMPTS", "ProgressLine", "check_out", "read_prompts", "record", "write_file", "write_json"]

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


class ProgressLine:
    """Prints a line on standard error for each stage, on a terminal with a counter."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, stage: str, done: int = 0, wanted: int = 0) -> None:
        """Show that ``done`` of ``wanted`` steps of ``stage`` are complete."""
        if stage != self._stage:
            self.close()
            self._stage = stage
            print(stage, end="" if self._live else "\n", file=sys.stderr, flush=True)
        if self._live and wanted:
            print(f"\r{stage}: {done}/{wanted}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the current line."""
        if self._stage and self._live:
            print(file=sys.stderr, flush=True)
        self._stage = ""


def check_out(out: Path | None, figures: bool) -> None:
    """Check, before any work, that files can be written to --out and figures be drawn."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise UserError(f"--out '{out}' is a file: give a directory")
    if figures:
        check_plots("give --no-figures")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make --out '{out}' ({error.strerror}): give another directory") from None


def write_json(path: Path, value: dict[str, Any]) -> Path:
    """Write one JSON file atomically; returns its path."""
    return write_file(path, json_module.dumps(value, allow_nan=False) + "\n")


def write_file(path: Path, content: str | bytes) -> Path:
    """Write a file atomically; returns its path."""
    try:
        return write_atomic(path, content)
    except OSError as error:
        raise UserError(f"cannot write '{path}' ({error.strerror}): free it or give another --out") from None


def read_prompts(file: Path | None, texts: int) -> list[str]:
    """``texts`` prompts: the file's lines, else the built-in ones, repeated if there are too few."""
    lines: Sequence[str] = PROMPTS
    if file is not None:
        try:
            lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read --prompts '{file}' ({error}): give a UTF-8 text, one prompt a line"
            ) from None
        if not lines:
            raise UserError(f"--prompts '{file}' is empty: give one prompt a line")
    return [lines[i % len(lines)] for i in range(texts)]


def record(
    pair: Pair, prompts: Sequence[str], new_tokens: int, sampling: Sampling, seed: int, progress: ProgressLine
) -> list[Recording]:
    """Run a short probe: texts of the target and of the draft for the same prompts, with both models' laws."""
    from sprinter.theory.recording import probe

    found = []
    for writer in ("target", "draft"):
        stage = f"recording {len(prompts)} texts by the {writer}"
        found.append(
            probe(
                pair, prompts, writer=writer, new_tokens=new_tokens, sampling=sampling, seed=seed,
                progress=lambda done, wanted, stage=stage: progress(stage, done, wanted),  # type: ignore[misc]
            )
        )  # fmt: skip
    return found
