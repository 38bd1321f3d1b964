"""Several units compiled at the same time, each by a Python process of its own.

The compiler spends most of its time in Python, on one core. The models are exported here, because they need not be
importable elsewhere; a process reads the exported program, which contains the weights, and writes compiled code.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sprinter.errors import UserError, first_line
from sprinter.models.capture.compiled import (
    Recipe,
    build,
    cannot_be_compiled,
    compiling,
    exported,
    keep_compiled,
    stem_if_missing,
)

__all__ = ["compile_together"]

_log = logging.getLogger("sprinter")
_LARGE = 512 * 2**20
"""Bytes of weights from which units are compiled one after the other: each process holds several copies."""


@dataclass(frozen=True, slots=True)
class _Job:
    recipe: Recipe
    stem: str
    folder: Path
    process: subprocess.Popen[bytes]


def compile_together(recipes: Sequence[Recipe]) -> None:
    """Compile those that are not on disk, as many at a time as there are cores; a single one is left to its first use.

    Raises:
        UserError: as in ``find_compiled``; what was compiled by then is kept.
    """
    at_once = min(len(recipes), _cores())
    if at_once < 2 or any(_bytes(recipe) > _LARGE for recipe in recipes):
        return
    with compiling(lambda: len(_missing(recipes)) > 1) as cache:
        if cache is None:
            return
        missing = _missing(recipes)
        _log.warning(
            "compiling %d parts of the models, once, %d at a time; a minute or two", len(missing), at_once
        )
        with ExitStack() as stack:
            running: list[_Job] = []
            stack.callback(_end, running)
            for done, job in enumerate(_finished(missing, cache, at_once, running, stack), 1):
                _finish(job)
                _log.warning("%d of %d parts are compiled", done, len(missing))


def _missing(recipes: Sequence[Recipe]) -> list[tuple[Recipe, str]]:
    stems = [(recipe, stem_if_missing(recipe)) for recipe in recipes]
    return [(recipe, stem) for recipe, stem in stems if stem is not None]


def _finished(
    missing: Sequence[tuple[Recipe, str]], cache: Path, at_once: int, running: list[_Job], stack: ExitStack
) -> Iterator[_Job]:
    """Start all jobs, ``at_once`` at a time, and yield each when its process has ended."""
    left = list(missing)
    while left or running:
        ended = next((job for job in running if job.process.poll() is not None), None)
        if ended is not None:
            running.remove(ended)
            yield ended
        elif left and len(running) < at_once:
            running.append(_start(*left.pop(0), cache, stack))
        else:
            time.sleep(0.05)


def _start(recipe: Recipe, stem: str, cache: Path, stack: ExitStack) -> _Job:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="tmp", suffix=".part", dir=cache)))
    program, options = exported(recipe)
    torch.export.save(program, folder / "program.pt2")
    told = {"threads": torch.get_num_threads(), "options": options}
    (folder / "job.json").write_text(json.dumps(told))
    home = str(Path(__file__).parents[3])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
    command = [sys.executable, "-m", "sprinter.models.capture.together", str(folder)]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdin=quiet, stdout=quiet, stderr=quiet
    )
    return _Job(recipe, stem, folder, process)


def _finish(job: _Job) -> None:
    """Keep what a process has compiled."""
    if job.process.returncode:
        told = job.folder / "error"
        code = job.process.returncode
        why = told.read_text() if told.exists() else f"its process ended with the code {code}"
        raise UserError(cannot_be_compiled(job.recipe, why))
    keep_compiled(job.recipe, job.folder / "code.pt2", job.stem)


def _end(running: Sequence[_Job]) -> None:
    """End the processes that still run, after an error or an interruption."""
    for job in running:
        job.process.kill()
        job.process.wait()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes(recipe: Recipe) -> int:
    return sum(weight.numel() * weight.element_size() for weight in recipe.model.parameters())


def main(folder: Path) -> int:
    """Compile the program in ``folder``; returns the exit status. An error's line is written into the folder."""
    told = json.loads((folder / "job.json").read_text())
    try:
        with _threads(told["threads"]):
            build(torch.export.load(folder / "program.pt2"), folder / "code.pt2", told["options"])
    except Exception as error:  # models fail to compile in many ways
        (folder / "error").write_text(first_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
