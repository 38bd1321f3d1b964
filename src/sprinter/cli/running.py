"""Runs the application; turns every error into an exit status and at most one line."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence

import typer
from typer.main import get_command

from sprinter.cli.app import app
from sprinter.cli.loading import debugging
from sprinter.cli.signature import in_options
from sprinter.errors import ProfileWarning, SprinterError, UserError

__all__ = ["run"]

_LONGEST = 600  # characters of an error line
_COMPLETE = "_SPRINTER_COMPLETE"  # set by the script that --install-completion writes


def run(args: Sequence[str]) -> int:
    """Run one command and return the exit status."""
    _repair_streams()
    try:
        with _quiet():
            status = _dispatch(args)
            sys.stdout.flush()
            return status
    except BrokenPipeError:  # the reader of our output has closed the pipe: nothing can be printed
        _drop_stdout()
        return 141
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        if debugging():
            traceback.print_exc()
        if isinstance(error, UserError):
            return _fail(in_options(str(error)), 2)
        if (usage := _usage_message(error)) is not None:
            return _fail(usage, 2)
        ours = isinstance(error, SprinterError)
        what = in_options(str(error)) if ours else f"{type(error).__name__}: {error}"
        return _fail(f"{_one_line(what)} (SPRINTER_DEBUG=1 shows the traceback)", 1)


def _dispatch(args: Sequence[str]) -> int:
    command = get_command(app)
    if _COMPLETE in os.environ:  # the shell asks for completions
        try:
            command.main(list(args), prog_name="sprinter")
        except SystemExit as leave:
            return leave.code if isinstance(leave.code, int) else 0
    try:
        # Not command.main(), which handles errors, pipes and Ctrl-C in its own way.
        with command.make_context("sprinter", list(args)) as context:
            status = command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    return status if isinstance(status, int) else 0


def _usage_message(error: Exception) -> str | None:
    """The message for a mistake in options or arguments; None for any other error."""
    message = getattr(error, "format_message", None)
    if message is None or getattr(error, "exit_code", None) != 2:
        return None
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "sprinter"
    line = _one_line(message()).rstrip(".").replace("Value error, ", "")
    return f"{line[:1].lower()}{line[1:]} (see '{path} --help')"


def _fail(message: str, status: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # e.g. a full disk: the interpreter's last flush must not fail again
        _drop_stdout()
    with contextlib.suppress(OSError):
        print(f"sprinter: error: {_one_line(message)}", file=sys.stderr, flush=True)
    return status


def _one_line(message: str) -> str:
    """A message without line breaks and control characters, shortened to 600 characters."""
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"


def _repair_streams() -> None:
    """Replace closed streams by the null device; escape characters that a stream's encoding lacks."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Redirect stdout to the null device, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars and advice of the libraries, which read these variables when they are imported."""
    if debugging():
        yield
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():  # a terminal shows the progress of a download
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", ProfileWarning)
            warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning as one line on standard error."""
    with contextlib.suppress(OSError):
        print(f"sprinter: warning: {_one_line(str(message))}", file=sys.stderr, flush=True)
