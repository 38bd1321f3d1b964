"""Hard grammars, each followed in a process of its own: see ``grammar_text``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from sprinter.engine import grammar_text
from sprinter.engine.grammar_text import GrammarError, receive, send

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["GrammarProcess", "GrammarProcesses"]

_MOST, _MOST_BYTES = 64, 512 << 20
"""Maximum number of processes that follow grammars by one tokenizer, and of bytes that they take."""
_TRIES = 3  # to have one forked: the one that forks may be ended meanwhile
_OWN = 4 << 20  # bytes of a process beside its grammar
_WALL_S = 60  # in which a grammar must be compiled where processes have no other limit
_TOO_HARD = "it takes too long, too much memory, or nests too deeply; give a simpler one"
_FORKS = hasattr(os, "fork")
_alive: WeakSet[GrammarProcesses] = WeakSet()


class _Wire(NamedTuple):
    """To a process."""

    asked: IO[bytes]
    answers: IO[bytes]
    end: Callable[[], None]
    """Ends the process, or lets an answer end."""


class GrammarProcesses:
    """Processes that follow grammars by one tokenizer, which a process without grammars has, and forks them.

    Where processes cannot fork (Windows), each makes the tokenizer anew, and has no limits but that of compiling.

    Args:
        tokenizer: the arguments of ``tokenizer_of``.
    """

    def __init__(self, tokenizer: tuple[str, int, int]) -> None:
        self._tokenizer, self._lock = tokenizer, Lock()
        self._first: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._end_first: Callable[[], object] = _nothing
        self._all: WeakSet[GrammarProcess] = WeakSet()
        _alive.add(self)

    def follow(self, grammar: str) -> GrammarProcess:
        """Compile a grammar in a new process.

        Raises:
            GrammarError: it cannot be compiled within the limits.
        """
        made = GrammarProcess(self, grammar)
        with self._lock:
            self._all.add(made)
        self.make_room()
        return made

    def wire(self) -> _Wire:
        """To a new process.

        Raises:
            GrammarError: the system allows none.
        """
        try:
            return self._wire()
        except (EOFError, OSError) as error:
            raise GrammarError(f"cannot be followed now: no process can be made for it ({error})") from None

    def _wire(self) -> _Wire:
        if not _FORKS:
            process = self._started()
            assert process.stdin and process.stdout
            send(process.stdin, self._tokenizer)
            receive(process.stdout)
            return _Wire(process.stdin, process.stdout, partial(_end, process))
        with self._lock:
            for tries in reversed(range(_TRIES)):
                own, other = socket.socketpair()
                stream: Any = own.makefile("rwb")
                try:
                    with other:
                        self._bring(other)
                    receive(stream)
                    break
                except (EOFError, OSError) as error:  # the one that forks has been ended, or can have no more
                    _shut(own, os.getpid())
                    self._end_first()
                    self._first = None
                    if not tries:
                        raise OSError(str(error) or "the system allows none") from None
        return _Wire(stream, stream, partial(_shut, own, os.getpid()))

    def make_room(self) -> None:
        """End the largest processes, or those that were used longest ago, of too many that answer nothing now. They are
        begun again when their texts ask."""
        with self._lock:
            live = sorted((one for one in self._all if one.size), key=lambda one: one.used)
        count, size = len(live), sum(one.size for one in live)
        while live and (count > _MOST or size > _MOST_BYTES):
            one = live.pop(0) if count > _MOST else live.pop(live.index(max(live, key=lambda one: one.size)))
            if took := one.rest():
                count, size = count - 1, size - took

    def drop(self) -> None:
        """Have no processes any more: after a fork they are the other process's."""
        self._lock = Lock()  # another thread may hold it, which is not in this process
        self._end_first()
        self._first = None
        for one in self._all:
            one.drop()

    def _bring(self, other: socket.socket) -> None:
        """Send the forking process a socket."""
        if self._first is None:
            control, given = socket.socketpair()
            with given:
                process = self._started(given.fileno())
            self._end_first = weakref.finalize(self, _end, process, control)
            assert process.stdin
            send(process.stdin, self._tokenizer)
            self._first = process, control
        socket.send_fds(self._first[1], [b"x"], [other.fileno()])

    def _started(self, *control: int) -> subprocess.Popen[bytes]:
        script = str(Path(grammar_text.__file__).resolve())
        return subprocess.Popen(
            [sys.executable, "-I", script, json.dumps([one for one in sys.path if one]), *map(str, control)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=control,
            start_new_session=True,  # what a terminal interrupts is the server, which ends it
        )  # fmt: skip


def _end(process: subprocess.Popen[bytes], control: socket.socket | None = None) -> None:
    if control is None:
        process.kill()
    else:
        control.close()  # those that it has forked end with it, or with their own sockets
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what it has not read
                pipe.close()
    process.wait()


def _shut(own: socket.socket, owner: int) -> None:
    """Let the process, and whoever waits for it, find the end; in a fork of the owner, only let go of it."""
    if os.getpid() != owner:
        os.close(
            own.detach()
        )  # the owner's other threads may be writing to its stream, which is not to be flushed
        return
    with suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    own.close()


class GrammarProcess:
    """A process that follows a grammar; another one once it has ended.

    Attributes:
        size: bytes that it takes; 0: there is none now.
        used: when it was asked last.

    Raises:
        GrammarError: see ``GrammarProcesses.follow``.
    """

    def __init__(self, processes: GrammarProcesses, grammar: str) -> None:
        self._processes, self._grammar, self._lock = processes, grammar, Lock()
        self._gone: deque[int] = deque()
        self._names = count()
        self._wire: _Wire | None = None
        self._end: Callable[[], object] = _nothing
        self.size, self.used = 0, 0.0
        with self._lock:
            self._begin()

    def copy(self, ends: Sequence[int]) -> ProcessText:
        """The grammar of another text."""
        return ProcessText(self, next(self._names), tuple(ends))

    def ask(self, text: int, ends: tuple[int, ...], name: str, *given: Any) -> Any:
        """The answer of a text's method. A process that has ended, perhaps over another text, is replaced once.

        Raises:
            GrammarError: as the method; a new process has ended too.
        """
        with self._lock:
            size = self.size
            for fresh in (self._wire is None, True):
                if self._wire is None:
                    self._begin()
                gone = [self._gone.popleft() for _ in range(len(self._gone))]
                try:
                    found = self._call((gone, text, ends, name, given), masks=name == "masks")
                    break
                except EOFError:
                    self._stop()
                    if fresh:
                        raise GrammarError(f"cannot be followed on: {_TOO_HARD}") from None
            grown = self.size > size
        if grown:
            self._processes.make_room()
        return found

    def forget(self, text: int) -> None:
        """A text is not asked about any more."""
        self._gone.append(text)

    def rest(self) -> int:
        """End the process if it answers nothing now; the number of bytes that it took."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            size = self.size
            self._stop()
            return size
        finally:
            self._lock.release()

    def drop(self) -> None:
        """See ``GrammarProcesses.drop``."""
        self._lock = Lock()
        self._stop()

    def _begin(self) -> None:
        self._wire = wire = self._processes.wire()
        self._end = weakref.finalize(self, wire.end)
        timer = None if _FORKS else Timer(_WALL_S, wire.end)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            self._call(self._grammar)
        except EOFError:
            self._stop()
            raise GrammarError(f"cannot be followed: {_TOO_HARD}") from None
        except GrammarError:
            self._stop()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _stop(self) -> None:
        self._end()
        self._wire, self.size = None, 0

    def _call(self, given: Any, *, masks: bool = False) -> Any:
        assert self._wire is not None
        self.used = time.monotonic()
        try:
            send(self._wire.asked, given)
            found, error, size = receive(self._wire.answers)
            self.size = size + _OWN
            if error is not None:
                raise GrammarError(error)
            return receive(self._wire.answers) if masks else found
        except OSError:
            raise EOFError from None


def _nothing() -> None:
    """There is nothing to end."""


def _forked() -> None:
    for one in list(_alive):
        one.drop()


if _FORKS:
    os.register_at_fork(after_in_child=_forked)


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
