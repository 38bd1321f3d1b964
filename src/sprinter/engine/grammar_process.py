"""Hard grammars, each followed in a process of its own: see ``grammar_text``."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Any

from sprinter.engine import grammar_text
from sprinter.engine.grammar_text import GrammarError, receive, send

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GrammarProcess", "GrammarProcesses"]

_WALL_S = 60
"""Seconds in which a grammar must be compiled."""
_TOO_HARD = "it takes too long, too much memory, or nests too deeply; give a simpler one"
_FORKS = hasattr(os, "fork")


class GrammarProcesses:
    """Processes that follow grammars by one tokenizer, which a process without grammars has, and forks them.

    Where processes cannot fork (Windows), each makes the tokenizer anew, and has no limits but that of compiling.

    Args:
        tokenizer: the arguments of ``tokenizer_of``. packages: the folder that has llguidance.
    """

    def __init__(self, tokenizer: tuple[str, int, int], packages: Path) -> None:
        self._tokenizer, self._packages, self._lock = tokenizer, packages, Lock()
        self._first: tuple[subprocess.Popen[bytes], socket.socket] | None = None

    def follow(self, grammar: str) -> GrammarProcess:
        """Compile a grammar in a new process.

        Raises:
            GrammarError: it cannot be compiled within the limits.
        """
        if not _FORKS:
            process = self._started()
            assert process.stdin and process.stdout
            return GrammarProcess(grammar, process.stdin, process.stdout, process.kill)
        own, other = socket.socketpair()
        with other, self._lock:
            try:
                self._bring(other)
            except OSError:  # it has been ended
                self._first = None
                self._bring(other)
        stream: Any = own.makefile("rwb")
        return GrammarProcess(grammar, stream, stream, partial(_shut, own))

    def _bring(self, other: socket.socket) -> None:
        """Send the forking process a socket."""
        if self._first is None:
            control, given = socket.socketpair()
            with given:
                self._first = self._started(given.fileno()), control
            weakref.finalize(self, _end, *self._first)
        socket.send_fds(self._first[1], [b"x"], [other.fileno()])

    def _started(self, *control: int) -> subprocess.Popen[bytes]:
        script = str(Path(grammar_text.__file__).resolve())
        process = subprocess.Popen(
            [sys.executable, "-I", script, str(self._packages), *map(str, control)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=control,
            start_new_session=True,  # what a terminal interrupts is the server, which ends it
        )  # fmt: skip
        assert process.stdin
        send(process.stdin, self._tokenizer)
        return process


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()  # those that it has forked end with their own
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _shut(own: socket.socket) -> None:
    """Let the process, and whoever waits for it, find the end."""
    with suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    own.close()


class GrammarProcess:
    """A process that follows a grammar.

    Args:
        asked: of it. answers: by it. end: ends it, or lets an answer end.

    Attributes:
        size: bytes that it takes.

    Raises:
        GrammarError: see ``GrammarProcesses.follow``.
    """

    def __init__(self, grammar: str, asked: IO[bytes], answers: IO[bytes], end: Callable[[], None]) -> None:
        self._asked, self._answers, self._lock = asked, answers, Lock()
        self._gone: deque[int] = deque()
        self._names = count()
        weakref.finalize(self, end)
        timer = Timer(_WALL_S, end)
        timer.daemon = True
        timer.start()
        try:
            self.size: int = self._call(grammar)
        except EOFError:
            raise GrammarError(f"cannot be followed: {_TOO_HARD}") from None
        finally:
            timer.cancel()

    def copy(self, ends: Sequence[int]) -> ProcessText:
        """The grammar of another text."""
        return ProcessText(self, next(self._names), tuple(ends))

    def ask(self, text: int, ends: tuple[int, ...], name: str, *given: Any) -> Any:
        """The answer of a text's method.

        Raises:
            GrammarError: as the method; the process has ended.
        """
        with self._lock:
            gone = [self._gone.popleft() for _ in range(len(self._gone))]
            try:
                return self._call((gone, text, ends, name, given), masks=name == "masks")
            except EOFError:
                raise GrammarError(f"cannot be followed on: {_TOO_HARD}") from None

    def forget(self, text: int) -> None:
        """A text is not asked about any more."""
        self._gone.append(text)

    def _call(self, given: Any, *, masks: bool = False) -> Any:
        try:
            send(self._asked, given)
            found, error = receive(self._answers)
            if error is not None:
                raise GrammarError(error)
            return receive(self._answers) if masks else found
        except OSError:
            raise EOFError from None


class ProcessText:
    """As ``GrammarText``, in the process that follows its grammar."""

    def __init__(self, process: GrammarProcess, name: int, ends: tuple[int, ...]) -> None:
        self._process, self._known = process, (name, ends)
        weakref.finalize(self, process.forget, name)

    def masks(self, texts: Sequence[tuple[int, ...]]) -> NDArray[Any]:
        found: NDArray[Any] = self._process.ask(*self._known, "masks", texts)
        return found

    def kept(self, text: tuple[int, ...], tokens: tuple[int, ...]) -> int:
        found: int = self._process.ask(*self._known, "kept", text, tokens)
        return found

    def forced(self, text: tuple[int, ...]) -> list[int]:
        found: list[int] = self._process.ask(*self._known, "forced", text)
        return found
