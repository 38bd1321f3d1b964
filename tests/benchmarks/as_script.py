"""Scripts run as the shell would, in processes that share the slow imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SLOW = ["torch", "transformers", "scipy", "matplotlib", "sprinter.bench.run", "sprinter.training.train"]


@dataclass(frozen=True)
class Ended:
    """What a script left: its exit status, what it printed."""

    status: int | None
    out: str
    err: str


def run_script(script: Path, *arguments: str, folder: Path, timeout_s: float = 280) -> Ended:
    """``python SCRIPT ARGUMENTS`` in the repository's root, its temporary files in ``folder``."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_SLOW)  # no effect once the server runs
    process = server.Process(target=_run, args=(str(script), arguments, str(folder)))
    process.start()
    process.join(timeout_s)
    if process.is_alive():
        process.kill()
        process.join()
    out, err = ((folder / name).read_text(encoding="utf-8", errors="replace") for name in ("out", "err"))
    return Ended(process.exitcode, out, err)


def _run(script: str, arguments: tuple[str, ...], folder: str) -> None:
    os.chdir(ROOT)
    os.environ["TMPDIR"] = folder
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    sys.argv, sys.path = [script, *arguments], [str(Path(script).parent), *sys.path]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # type: ignore[attr-defined]  # as an interpreter that ends does
        sys.stdout.flush()
        sys.stderr.flush()
