"""The command line ``sprinter``: one short module per command; torch is imported only when a command needs it.

| modules | contents |
| --- | --- |
| ``app``, ``running`` | the typer application; runs it and turns errors into one line and an exit status |
| ``generate``, ``generate_many`` | ``sprinter generate``: one text, or a file of prompts |
| ``chat``, ``chat_*`` | ``sprinter chat``: the conversation, its commands, input, output, files |
| ``serve``, ``methods``, ``doctor``, ``demo_command``, ``convert`` | commands of these names (``demo``: entry point) |
| ``gate``, ``gate_*`` | ``sprinter gate``: ``label``, ``train``, ``roc`` |
| ``theory``, ``theory_*`` | ``sprinter theory``: ``simulate``, ``pareto``, ``flops``, ``predict`` |
| ``bench``, ``bench_*`` | ``sprinter bench``: ``compare``, ``report``, ``list`` |
| ``options``, ``loading``, ``generating``, ``signature``, ``unused`` | options that commands share |
| ``pages``, ``messages``, ``prompts``, ``completion``, ``debug`` | output, wording, input, completion, debugging |

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
