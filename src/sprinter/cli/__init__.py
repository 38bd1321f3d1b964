"""The command line: one thin file a command, nothing heavy imported before it is needed.

Exit status: 0 done, 2 the user's mistake, 1 anything else, 130 after Ctrl-C, 141 when the reader of a pipe has left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``sprinter`` with these arguments (None: those of the process) and return the exit status."""
    from sprinter.cli.running import run

    return run(sys.argv[1:] if argv is None else list(argv))
