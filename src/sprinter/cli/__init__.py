"""The command line ``sprinter``: a module per command or group; torch is imported only when it is needed.

| modules | contents |
| --- | --- |
| ``app``, ``running`` | the typer application; runs it and turns errors into one line and an exit status |
| ``generate``, ``generate_many`` | ``sprinter generate``: one text, or a file of prompts |
| ``chat``, ``chat_commands``, ``chat_session`` | ``sprinter chat``: its loop, what is typed, the conversation |
| ``serve``, ``methods``, ``doctor``, ``advise``, ``demo``, ``eval``, ``tune`` | commands of these names |
| ``gate``, ``draft``, ``theory``, ``bench``, ``convert`` | groups of commands of these names |
| ``doctor_probe``, ``probe_texts`` | ``sprinter doctor --probe`` |
| ``options``, ``loading``, ``generating`` | options that commands share |
| ``signature`` | how settings become options, groups of commands, --help; messages in their words |
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
