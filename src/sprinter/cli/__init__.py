"""The command line ``sprinter``: one short module per command; torch is imported only when a command needs it.

| modules | contents |
| --- | --- |
| ``app``, ``running`` | the typer application; runs it and turns errors into one line and an exit status |
| ``generate``, ``generate_many`` | ``sprinter generate``: one text, or a file of prompts |
| ``chat``, ``chat_commands``, ``chat_session`` | ``sprinter chat``: its loop, what is typed, the conversation |
| ``serve``, ``methods``, ``doctor``, ``demo``, ``convert``, ``tune`` | commands of these names |
| ``doctor_probe``, ``probe_texts`` | ``sprinter doctor --probe`` |
| ``gate_*``, ``draft_*``, ``theory_*`` | commands of ``sprinter gate``, ``draft``, ``theory``; what they share |
| ``bench``, ``bench_results`` | ``sprinter bench``: a run, results of runs |
| ``options``, ``loading``, ``generating`` | options that commands share; messages in their words |
| ``signature`` | how a command gets shared options, groups of commands, --help and --help-all |
| ``pages``, ``progress``, ``prompts`` | output, input |

Exit status: 0 success, 2 a mistake of the user, 1 any other failure, 130 after Ctrl-C, 141 if the reader of a pipe has
closed it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``sprinter`` with these arguments (None: those of the process) and return the exit status."""
    from sprinter.cli.running import run

    return run(sys.argv[1:] if argv is None else list(argv))
