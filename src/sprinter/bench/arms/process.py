"""A child process that answers each line of JSON with a line of JSON."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from sprinter.errors import SprinterError, UserError

__all__ = ["JsonProcess"]

_PATIENCE_S = 5.0  # time between closing the child's input and killing it
_TAIL_BYTES = 1 << 14


class JsonProcess:
    """Starts a child; ``ask`` sends a line and waits for the answer. The child ends no later than this process.

    Args:
        command: the command line.
        env: environment variables of the child.
        what: name of the child, for error messages.

    Raises:
        UserError: the command cannot be run.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], what: str) -> None:
        self._what = what
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        try:
            # A separate process group: Ctrl-C reaches only this process, and the child's children end with it.
            self._child = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                encoding="utf-8", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise UserError(
                f"{what} cannot be started ({command[0]}: {error.strerror}): check the path"
            ) from error
        atexit.register(self.close)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and return the child's answer.

        Raises:
            UserError: the child reports a mistake of the user ({"mistake": line}).
            SprinterError: the child reports an error ({"error": line}), or it has died; the message has its last line
                on stderr.
        """
        sink, source = self._child.stdin, self._child.stdout
        assert sink is not None and source is not None
        line = ""
        with contextlib.suppress(OSError, ValueError):  # a broken or closed pipe: the child has died
            sink.write(json.dumps(message) + "\n")
            sink.flush()
            line = source.readline()
        if not line:
            raise SprinterError(self._obituary())
        answer: dict[str, Any] = json.loads(line)
        if "mistake" in answer:
            raise UserError(answer["mistake"])
        if "error" in answer:
            raise SprinterError(f"{self._what}: {answer['error']}")
        return answer

    def close(self) -> None:
        """End the child, by force if necessary; may be called twice."""
        atexit.unregister(self.close)
        child = self._child
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_PATIENCE_S)
        self._kill()
        self._log.close()

    def _kill(self) -> None:
        """Kill the child and its remaining children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()

    def _obituary(self) -> str:
        """Error message with the child's exit status and its last line of output."""
        try:
            status = self._child.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._kill()
            status = self._child.returncode
        if self._log.closed:
            return f"{self._what} was closed"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        last = lines[-1].strip() if lines else "it said nothing"
        return f"{self._what} ended with status {status}: {last}"
