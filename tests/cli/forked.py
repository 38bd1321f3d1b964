"""The command line in processes that a process with the libraries forks: loading them each time takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_FORKER = """
import json, os, signal, sys
import sprinter.engine.pair, transformers.models.llama.modeling_llama
from sprinter.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
for line in sys.stdin:
    child = os.fork()  # one thread so far
    if child == 0:
        given = json.loads(line)
        for number, path in enumerate(given["streams"]):
            os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
        sys.stdin = open(0, closefd=False)
        sys.exit(main(given["args"]))
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Forked:
    """A process that runs: its number, what it writes, and its exit status."""

    pid: int
    out: BinaryIO
    _errors: Path
    _forker: subprocess.Popen[str]

    def status(self) -> int:
        """Wait for the end."""
        assert self._forker.stdout is not None
        return int(self._forker.stdout.readline())

    def errors(self) -> str:
        """Its standard error so far."""
        return self._errors.read_text()


class Forker:
    """Starts such processes, one at a time."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._folder = folder
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", _FORKER], env=environment, stdin=pipe, stdout=pipe, text=True
        )

    @contextmanager
    def run(self, *args: str, stdin: bytes = b"") -> Iterator[Forked]:
        """``sprinter`` with these arguments; its standard output is a pipe."""
        streams = [self._folder / name for name in ("in", "out", "errors")]
        streams[0].write_bytes(stdin)
        streams[2].write_bytes(b"")
        streams[1].unlink(missing_ok=True)
        os.mkfifo(streams[1])
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"args": args, "streams": [*map(str, streams)]}) + "\n")
        process.stdin.flush()
        with streams[1].open("rb") as out:
            yield Forked(int(process.stdout.readline()), out, streams[2], process)

    def close(self) -> None:
        """End the process that forks."""
        with self._process as process:  # closes its streams
            pass
        assert process.returncode == 0
