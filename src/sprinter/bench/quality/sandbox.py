"""Run a program that nobody has read: time, memory, processes and files limited, no network. Linux only.

The program runs in a Python of its own (no site packages, empty environment, empty directory, session of its own). The
kernel limits CPU time, memory, file size, open files and processes (no new one may start). There is no network: a user
and network namespace of its own where the kernel allows that ("namespace"); everywhere, and alone where it does not
("guard"), Python's audit hook refuses sockets, processes, foreign functions and writing to files. Root becomes the user
nobody first. This holds accidents and ordinary mischief; against an attacker use a virtual machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Literal

from sprinter.decode.checks import at_least, between
from sprinter.errors import UserError

__all__ = ["Outcome", "SandboxLimits", "SandboxNetwork", "network", "run_code"]

SandboxNetwork = Literal["namespace", "guard"]
"""What keeps a program from the network."""

_CHILD = Path(__file__).with_name("sandbox_child.py")
_SAID_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What a program may use.

    Attributes:
        seconds: of wall-clock time; CPU time is limited to the next whole number.
        memory_bytes: of address space.
        file_bytes: of any file that it writes to.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        between("seconds", self.seconds, 0.1, 3600)
        at_least("memory_bytes", self.memory_bytes, 1 << 26)
        at_least("file_bytes", self.file_bytes, 1 << 12)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: it came to its end.
        why: "passed", "out of time", the error in one line, or the signal that ended it.
        network: what kept it from the network; None: it ended before that was told.
    """

    passed: bool
    why: str
    network: SandboxNetwork | None


@cache
def network() -> SandboxNetwork:
    """What keeps programs from the network on this machine; tried once.

    Raises:
        UserError: programs cannot be held here; says why.
    """
    outcome = run_code("pass", SandboxLimits(seconds=30))
    if not outcome.passed or outcome.network is None:
        raise UserError(f"generated code cannot be run here ({outcome.why}): leave --run-code away")
    return outcome.network


def run_code(program: str, limits: SandboxLimits) -> Outcome:
    """Run a program to its end or to its limits.

    Raises:
        UserError: not Linux, or the limits cannot be set.
    """
    if sys.platform != "linux":
        raise UserError("generated code is run on Linux alone, whose limits hold it: leave --run-code away")
    wanted = [-(-limits.seconds // 1), limits.memory_bytes, limits.file_bytes]
    # Nothing of ours is on its path and nothing of the user's in its environment.
    command = [sys.executable, "-I", "-S", "-B", str(_CHILD), *(str(int(value)) for value in wanted)]
    with TemporaryDirectory(prefix="sprinter-") as home, TemporaryFile() as source, TemporaryFile() as said:
        os.chmod(home, 0o755)  # may be another user's home
        source.write(program.encode("utf-8", "replace"))
        source.seek(0)
        child = subprocess.Popen(
            command,
            cwd=home,
            env={},
            stdin=source,
            stdout=said,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        late = not _ends(child, limits.seconds)
        return _outcome(_read(said), child.returncode, late)


def _ends(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the child ends in time; if not, it and all that it started are killed."""
    try:
        child.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if child.returncode is None:  # also where the user interrupts
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(said: IO[bytes]) -> dict[str, Any]:
    """What the child said: one JSON object a line."""
    said.seek(0)
    facts: dict[str, Any] = {}
    for line in said.read(_SAID_BYTES).splitlines():
        try:
            facts |= json.loads(line)
        except (ValueError, TypeError):
            return {}  # the program has written there
    return facts


def _outcome(facts: dict[str, Any], status: int, late: bool) -> Outcome:
    if "refused" in facts:
        raise UserError(f"generated code cannot be run here ({facts['refused']}): leave --run-code away")
    if late:
        why = "out of time"
    elif status < 0:
        why = f"ended by {signal.Signals(-status).name}"
    elif facts.get("passed") is True and status == 0:
        why = "passed"
    else:
        why = str(facts.get("failed", f"ended with status {status}"))
    return Outcome(why == "passed", why, facts.get("network"))
