"""Several units compiled at the same time: by this process and by helpers, Python processes of their own.

The compiler spends most of its time in Python, on one core. All units are exported here, because a model need not be
importable elsewhere; an exported program contains its weights. Programs lie in a folder, from which each process takes
one after the other: ``N.todo`` becomes ``N.taken``, then ``N.done`` (the code) or ``N.error``.
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

from sprinter.models.capture.compiled import (
    Recipe,
    build,
    compiling,
    exported,
    keep_compiled,
    kind_of,
    stem_if_missing,
)

__all__ = ["compile_together", "help_compile"]

_log = logging.getLogger("sprinter")
_LARGE = 512 * 2**20
"""Bytes of weights from which units are compiled one after the other: each process holds several copies."""
_PAUSE_S = 0.05


def compile_together(recipes: Sequence[Recipe]) -> None:
    """Compile those that are not on disk, as many at a time as there are cores.

    A single one is left to its first use, and so is what cannot be compiled here: ``find_compiled`` says why.

    Raises:
        UserError: there is no C++ compiler, a model cannot be exported, or it changed meanwhile; what was compiled by
            then is kept.
    """
    if min(len(recipes), _cores()) < 2 or any(_bytes(recipe) > _LARGE for recipe in recipes):
        return
    with compiling(lambda: len(_missing(recipes)) > 1) as cache:
        if cache is None:
            return
        missing = _missing(recipes)
        at_once = min(len(missing), _cores())
        long = (
            "a minute or two"
            if any(recipe.model is not None for recipe, _ in missing)
            else "some ten seconds"
        )
        _log.warning("compiling %d parts of the models, once, %d at a time; %s", len(missing), at_once, long)
        with TemporaryDirectory(
            prefix="tmp", suffix=".part", dir=cache, ignore_cleanup_errors=True
        ) as folder:
            _compile_all(missing, Path(folder), at_once)


def _missing(recipes: Sequence[Recipe]) -> list[tuple[Recipe, str]]:
    """Recipes and stems. Of models of one architecture only the first: the compiler's own files for them may have the
    same names."""
    stems = {kind_of(recipe): (recipe, stem_if_missing(recipe)) for recipe in reversed(recipes)}
    return [(recipe, stem) for recipe, stem in reversed(stems.values()) if stem is not None]


def _compile_all(missing: Sequence[tuple[Recipe, str]], folder: Path, at_once: int) -> None:
    helpers: list[subprocess.Popen[bytes]] = []
    try:
        helpers.extend(_start(folder) for _ in range(at_once - 1))
        left = {i: one for i, one in enumerate(missing) if _put(folder / f"{i}.todo", one[0])}
        (folder / "whole").touch()
        kept = 0
        while left:
            worked = _work(folder)
            alive = any(helper.poll() is None for helper in helpers)
            for number in list(left):
                place = folder / str(number)
                if place.with_suffix(".done").exists():
                    keep_compiled(left[number][0], place.with_suffix(".done"), left[number][1])
                    del left[number]
                    kept += 1
                    _log.warning("compiled %d of %d parts", kept, len(missing))
                elif place.with_suffix(".error").exists():
                    del left[number]
            if left and not worked:
                if not alive:
                    return  # a helper has died with its work
                time.sleep(_PAUSE_S)
    finally:
        for helper in helpers:
            helper.kill()
            helper.wait()


_HELPER = """
import sys
sys.path.append(sys.argv[1])
from sprinter.models.capture.together import help_compile
help_compile(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
"""


def _start(folder: Path) -> subprocess.Popen[bytes]:
    home, parent, threads = str(Path(__file__).parents[3]), str(os.getpid()), str(torch.get_num_threads())
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _HELPER, home, str(folder), parent, threads],
        stdin=quiet,
        stdout=quiet,
        stderr=quiet,
    )


def _put(todo: Path, recipe: Recipe) -> bool:
    """Lay a program into the folder; False if it cannot be written."""
    program, options = exported(recipe)
    try:
        torch.export.save(program, todo.with_suffix(".pt2"))
    except Exception:  # an operator or a constant that has no written form
        _log.debug("%s is compiled when first needed", recipe.name, exc_info=True)
        return False
    part = todo.with_suffix(".json")
    part.write_text(json.dumps(options))
    part.rename(todo)
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
        except Exception:  # models fail to compile in many ways
            _log.debug("a part cannot be compiled beside others", exc_info=True)
            todo.with_suffix(".error").touch()
        else:
            code.rename(todo.with_suffix(".done"))
        return True
    return False


def help_compile(folder: str, parent: int, threads: int) -> None:
    """Work in a helper until all programs are taken, or the process that began is gone.

    Args:
        folder: of the programs.
        parent: id of the process that began.
        threads: of that process; they are part of the code.
    """
    torch.set_num_threads(threads)
    place = Path(folder)
    while _work(place) or not (place / "whole").exists():
        if os.getppid() != parent:
            return
        time.sleep(_PAUSE_S)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes(recipe: Recipe) -> int:
    parts = (recipe.model, recipe.unit)
    return sum(
        one.numel() * one.element_size() for part in parts if part is not None for one in part.parameters()
    )
