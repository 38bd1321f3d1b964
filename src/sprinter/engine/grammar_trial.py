"""A grammar is tried before it is compiled: in a process of its own, with limits.

llguidance may take hours and all memory over a few characters (``multipleOf``, patterns that must all hold), and rules
that nest deeply overflow the stack of its thread, which ends the process. What ends the trial is refused.

This file runs as a script too, in a Python that need not know this package.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["LIMITS", "is_plain", "on_deep_stack", "trial"]

Made = TypeVar("Made")
LIMITS = {"verbose_errors": False, "max_items_in_row": 50_000, "max_grammar_size": 1 << 14}
"""Limits of a parser. Of a row each alternative of a schema has some items. A token takes up to the square of the
grammar's size, with the interpreter's lock: a tenth of a second at this one."""
_CPU_S, _WALL_S = 5, 60
_MEMORY = 48 << 20  # bytes that compiling may take
_STACK = 64 << 20  # bytes; the trial has half
_PLAIN = 1 << 12  # characters of a schema that is not tried
_HARD = ('"multipleOf"', '"pattern', '"allOf"', '"format"')
_stacks = threading.Lock()


def is_plain(schema: str) -> bool:
    """Whether a schema, or choices, are so few and simple that they need no trial."""
    return len(schema) < _PLAIN and not any(word in schema for word in _HARD)


def trial(grammar: str, packages: Path) -> int | None:
    """The bytes that compiling a grammar takes; None: it cannot be compiled within the limits.

    Args:
        grammar: in llguidance's terms. packages: the folder that has llguidance.
    """
    command = [sys.executable, "-I", str(Path(__file__).resolve()), str(packages)]
    try:
        done = subprocess.run(
            command, input=grammar.encode(), capture_output=True, timeout=_WALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 else None


def on_deep_stack(work: Callable[[], Made], size: int = _STACK) -> Made:
    """The result of work that recurses, in a thread with a large stack."""
    found: list[Made] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="sprinter-grammar")
    with _stacks:  # the size is that of all threads that begin meanwhile
        before = threading.stack_size(size)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _limit() -> None:
    """Let this process end where it takes too much, and run behind others."""
    with suppress(ImportError, OSError, ValueError):  # another system, or harder limits already
        import resource

        os.nice(10)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + _MEMORY + _STACK // 2
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _try(llguidance: Any, grammar: str) -> None:
    tokens = llguidance.LLTokenizer("byte")
    llguidance.LLMatcher(tokens, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))


def _main() -> None:
    sys.path.append(sys.argv[1])
    import llguidance

    grammar = sys.stdin.buffer.read().decode()
    _limit()
    before = _peak()
    on_deep_stack(lambda: _try(llguidance, grammar), _STACK // 2)
    sys.stdout.write(str(_peak() - before))
    sys.stdout.flush()
    os._exit(0)


def _peak() -> int:
    """The most memory that this process has had, bytes; 0: the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    _main()
