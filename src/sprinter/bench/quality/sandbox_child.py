"""The sandboxed process: a script that drops its privileges, then runs the program on its standard input.

Started by ``sandbox.run_code`` as ``python -I -S -B sandbox_child.py CPU_SECONDS MEMORY_BYTES FILE_BYTES``. It writes
one JSON object per line to standard output: what blocks the program's network access, and how the program ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

_NOBODY = 65534
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_DEATH_SIGNAL, _DUMPABLE, _NO_NEW_RIGHTS = 1, 4, 38  # of prctl
_OPEN_FILES = 64

_REFUSED = (
    "socket.", "subprocess.", "ctypes.", "pty.", "shutil.", "sqlite3.", "resource.", "os.fork", "os.exec", "os.spawn",
    "os.posix_spawn", "os.system", "os.kill", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "os.lchown", "os.chflags", "os.utime", "os.setxattr", "os.removexattr",
    "signal.pthread_kill",
)  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def main() -> None:
    """Limit this process, run the program, report how it ended."""
    source = sys.stdin.buffer.read().decode()
    say = _take_streams()
    try:
        network = _give_up_rights()
        _limit(*(int(value) for value in sys.argv[1:4]))
    except (OSError, ValueError) as error:
        say({"refused": str(error)})
        os._exit(1)
    say({"network": network})
    sys.addaudithook(_guard())
    try:
        # Running the given program is the purpose of this script.
        exec(compile(source, "<answer>", "exec"), {"__name__": "__main__"})  # noqa: S102
    except BaseException as error:
        say({"failed": " ".join(f"{type(error).__name__}: {error}".split())[:200]})
        os._exit(1)
    say({"passed": True})
    os._exit(0)


def _take_streams() -> Callable[[dict[str, Any]], None]:
    """Reserve standard output for reports; the program gets none of the three standard streams."""
    own, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)

    def say(facts: dict[str, Any], write: Callable[[int, bytes], int] = os.write) -> None:
        write(own, json.dumps(facts).encode() + b"\n")

    return say


def _give_up_rights() -> str:
    """Drop root, leave the network and die with the parent; return what blocks network access."""
    if os.geteuid() == 0:
        _become_nobody()
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    alone = libc.unshare(_NEW_USER | _NEW_NET) == 0
    # After the change of user, which resets these options.
    for option, value in ((_DEATH_SIGNAL, int(signal.SIGKILL)), (_DUMPABLE, 1), (_NO_NEW_RIGHTS, 1)):
        if libc.prctl(option, value, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl failed")
    if not any(os.access(os.path.join(path, "os.py"), os.R_OK) for path in sys.path):
        raise OSError("the user nobody cannot read this Python")
    return "namespace" if alone else "guard"


def _become_nobody() -> None:
    """Change from root to the user nobody; the standard library stays readable, even in root's directories."""
    folders = {path: os.open(path, os.O_RDONLY) for path in sys.path if os.path.isdir(path)}
    try:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    except OSError:
        raise OSError("root may not become the user nobody here") from None
    _look_there({path: f"/proc/self/fd/{folder}" for path, folder in folders.items()})


def _look_there(paths: dict[str, str]) -> None:
    """Redirect imports to other paths of the same directories, for packages that are already loaded too."""
    sys.path[:] = paths.values()
    sys.path_importer_cache.clear()
    for module in list(sys.modules.values()):
        own: Any = getattr(module, "__path__", None)
        if isinstance(own, list):
            parts = [os.path.split(path) for path in own]
            own[:] = [os.path.join(paths.get(folder, folder), name) for folder, name in parts]


def _limit(cpu_s: int, memory_bytes: int, file_bytes: int) -> None:
    import resource

    wanted = {
        resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,  # no other process or thread
    }  # fmt: skip
    for what, most in wanted.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _guard() -> Callable[[str, tuple[Any, ...]], None]:
    """Make the audit hook. It uses no name that the program could rebind."""

    def guard(
        event: str, args: tuple[Any, ...], refused: tuple[str, ...] = _REFUSED, writing: int = _WRITING
    ) -> None:
        if event.startswith(refused):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and isinstance(args[2], int) and args[2] & writing:
            raise PermissionError("writing files is not allowed here")

    return guard


if __name__ == "__main__":
    main()
