"""Several units compiled at the same time: by this process and by helpers, Python processes of their own.

The compiler spends most of its time in Python, on one core. All units are exported here, because a model need not be
importable elsewhere; an exported program contains its weights. Programs lie in a folder, from which each process takes
one after the other: ``N.todo`` becomes ``N.taken``, then ``N.done`` (the code) or ``N.error`` (a line).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
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
_PAUSE_S = 0.05


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
        with TemporaryDirectory(prefix="tmp", suffix=".part", dir=cache) as folder:
            _compile_all(missing, Path(folder), at_once)


def _missing(recipes: Sequence[Recipe]) -> list[tuple[Recipe, str]]:
    stems = [(recipe, stem_if_missing(recipe)) for recipe in recipes]
    return [(recipe, stem) for recipe, stem in stems if stem is not None]


def _compile_all(missing: Sequence[tuple[Recipe, str]], folder: Path, at_once: int) -> None:
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        helpers.extend(_start(folder) for _ in range(at_once - 1))
        for number, (recipe, _) in enumerate(missing):
            _put(folder / f"{number}.todo", recipe)
        (folder / "whole").touch()
        left = dict(enumerate(missing))
        while left:
            worked = _work(folder)
            alive = any(helper.poll() is None for helper in helpers)
            for number in list(left):
                if _keep(folder / str(number), *left[number]):
                    del left[number]
                    _log.warning("%d of %d parts are compiled", len(missing) - len(left), len(missing))
            if left and not worked:
                if not alive:
                    codes = ", ".join(str(helper.returncode) for helper in helpers)
                    why = f"the compiler's process ended with the code {codes}"
                    raise UserError(cannot_be_compiled(next(iter(left.values()))[0], why))
                time.sleep(_PAUSE_S)
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


def _start(folder: Path) -> subprocess.Popen[bytes]:
    threads = str(torch.get_num_threads())  # part of the code
    home, quiet = str(Path(__file__).parents[3]), subprocess.DEVNULL
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.Popen(
        [sys.executable, "-m", "sprinter.models.capture.together", str(folder), threads],
        env={**os.environ, "PYTHONPATH": path},
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
    )


def _put(todo: Path, recipe: Recipe) -> None:
    program, options = exported(recipe)
    torch.export.save(program, todo.with_suffix(".pt2"))
    part = todo.with_suffix(".json")
    part.write_text(json.dumps(options))
    part.rename(todo)


def _keep(place: Path, recipe: Recipe, stem: str) -> bool:
    """Keep code that is done; whether it is."""
    error, done = place.with_suffix(".error"), place.with_suffix(".done")
    if error.exists():
        raise UserError(cannot_be_compiled(recipe, error.read_text()))
    if not done.exists():
        return False
    keep_compiled(recipe, done, stem)
    return True


def _work(folder: Path) -> bool:
    """Compile the first program that nobody has taken; whether there was one."""
    for todo in sorted(folder.glob("*.todo")):
        taken = todo.with_suffix(".taken")
        try:
            todo.rename(taken)
        except FileNotFoundError:  # another process was faster
            continue
        code = folder / f"{todo.stem}-code.pt2"
        options = json.loads(taken.read_text())
        try:
            build(torch.export.load(todo.with_suffix(".pt2")), code, options)
        except Exception as error:  # models fail to compile in many ways
            line = folder / f"{todo.stem}-line"
            line.write_text(first_line(error))
            line.rename(todo.with_suffix(".error"))
        else:
            code.rename(todo.with_suffix(".done"))
        return True
    return False


def _help(folder: Path, parent: int, threads: int) -> None:
    """Work until all programs are taken, or the process that began is gone."""
    torch.set_num_threads(threads)
    while _work(folder) or not (folder / "whole").exists():
        if os.getppid() != parent:
            return
        time.sleep(_PAUSE_S)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes(recipe: Recipe) -> int:
    return sum(weight.numel() * weight.element_size() for weight in recipe.model.parameters())


if __name__ == "__main__":
    _help(Path(sys.argv[1]), os.getppid(), int(sys.argv[2]))
