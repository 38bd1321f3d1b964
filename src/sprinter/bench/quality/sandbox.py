"""Run untrusted code with limits on time, memory, processes and files, and without network. Linux only.

The program runs in a separate Python process (no site packages, empty environment, empty directory, own session). The
kernel limits CPU time, memory, file size, open files and processes (no new one may start). Network access is blocked by
a user and network namespace if the kernel allows one ("namespace"). In any case, and without a namespace as the only
protection ("guard"), Python's audit hook denies sockets, processes, foreign functions and writing to files. Root
becomes the user nobody first. This stops accidents and simple abuse; against an attacker use a virtual machine.
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

from sprinter.errors import UserError

__all__ = ["Outcome", "SandboxLimits", "SandboxNetwork", "network", "run_code"]

SandboxNetwork = Literal["namespace", "guard"]
"""What blocks a program's network access."""

_CHILD = Path(__file__).with_name("sandbox_child.py")
_SAID_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits of a program.

    Attributes:
        seconds: wall-clock time; CPU time is limited to the next whole number of seconds.
        memory_bytes: address space.
        file_bytes: size of each file that it writes.
    """

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: whether it ran to its end.
        why: "passed", "out of time", the error in one line, or the signal that ended it.
        network: what blocked its network access; None: it ended before this was reported.
    """

    passed: bool
    why: str
    network: SandboxNetwork | None


@cache
def network() -> SandboxNetwork:
    """What blocks programs' network access on this machine; determined once, by a trial.

    Raises:
        UserError: programs cannot be sandboxed on this machine; gives the reason.
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
    # -I -S: neither this package on its path nor the user's environment.
    command = [sys.executable, "-I", "-S", "-B", str(_CHILD), *(str(int(value)) for value in wanted)]
    with TemporaryDirectory(prefix="sprinter-") as home, TemporaryFile() as source, TemporaryFile() as said:
        os.chmod(home, 0o755)  # the home may have to be readable for another user
        source.write(program.encode("utf-8", "replace"))
        source.seek(0)
        child = subprocess.Popen(
            command, cwd=home, env={}, stdin=source, stdout=said, stderr=subprocess.DEVNULL, start_new_session=True
        )  # fmt: skip
        late = not _ends(child, limits.seconds)
        return _outcome(_read(said), child.returncode, late)


def _ends(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the child ends in time; if not, kill it and all that it started."""
    try:
        child.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        if child.returncode is None:  # also after an interrupt by the user
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _read(said: IO[bytes]) -> dict[str, Any]:
    """Merge the child's reports, one JSON object per line."""
    said.seek(0)
    facts: dict[str, Any] = {}
    for line in said.read(_SAID_BYTES).splitlines():
        try:
            facts |= json.loads(line)
        except (ValueError, TypeError):
            return {}  # the program has written to it
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
