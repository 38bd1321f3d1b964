"""The exception tree.

``Exception``
└── ``SprinterError``: everything that this package raises on purpose
    ├── ``UserError`` (also a ``ValueError``): the user's mistake; one line says what is wrong and how to fix it
    │   ├── ``OptionError`` (also a ``TypeError``): a keyword that is not an option
    │   ├── ``RowsError``: a batch size that the models cannot run
    │   └── ``ContextLengthError``: a text that is longer than what the models can read
    ├── ``BatchError``: some of many requests failed; it holds the results and errors of all of them
    └── ``EngineError``: an ``AsyncEngine`` does not take a request, or does not finish it
        ├── ``QueueFullError``: too many requests wait already
        ├── ``NoMemoryError``: there is not enough memory for it now
        ├── ``ClosedEngineError``: the engine is closed, or takes no more requests before it closes
        └── ``DeadEngineError``: the engine's thread has stopped with an error

``ProfileWarning`` (a ``UserWarning``): a profile was made on another machine, or on other texts.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = [
    "BatchError",
    "ClosedEngineError",
    "ContextLengthError",
    "DeadEngineError",
    "EngineError",
    "NoMemoryError",
    "OptionError",
    "ProfileWarning",
    "QueueFullError",
    "RowsError",
    "SprinterError",
    "UserError",
    "did_you_mean",
    "first_line",
    "install_line",
    "nearest",
    "refuse_long",
]


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not empty; its class if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def install_line(extra: str) -> str:
    """The command that installs an extra in a clone, and its packages by name, which works wherever this one came from.

    There is no release on PyPI, so that the name of this package would find nothing there.
    """
    from importlib.metadata import PackageNotFoundError, requires  # the command line's help does without it

    try:
        stated = requires("sprinter-llm") or []
    except PackageNotFoundError:  # it runs from its source
        stated = []
    found = [re.fullmatch(rf"(\S+) *; *extra == ['\"]{extra}['\"]", line) for line in stated]
    packages = " ".join(shlex.quote(one[1]) for one in found if one)
    clone = f"pip install '.[{extra}]' in a clone of Sprinter"
    return f"{clone}, or pip install {packages}" if packages else clone


class SprinterError(Exception):
    """Base of every error that this package raises on purpose."""


class UserError(SprinterError, ValueError):
    """The user's mistake: one line that says what is wrong and how to fix it."""


def nearest(name: object, known: Iterable[str], least: float = 0.5) -> str | None:
    """The known name that is most alike, by difflib's ratio; None: none has ``least``."""
    from difflib import get_close_matches  # the command line's help does without it

    return next(iter(get_close_matches(str(name), list(known), n=1, cutoff=least)), None)


def did_you_mean(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for an unknown name, with a suggestion: the nearest known name."""
    names = list(known)
    near = nearest(name, names)
    hint = f"did you mean '{near}'?" if near else f"known: {', '.join(names)}"
    return UserError(f"unknown {kind} '{name}': {hint}")


def refuse_long(name: str, value: object) -> None:
    """Raise a UserError for a whole number that Python neither prints nor makes a float of."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise UserError(f"{name} has more than {sys.float_info.max_10_exp} digits: give a smaller number")


class OptionError(UserError, TypeError):
    """A keyword that is not an option; names the nearest option."""


class RowsError(UserError):
    """More rows per batch than the models can run, or fewer than a method needs; not the fault of a single request."""


class ContextLengthError(UserError):
    """A prompt, or a prompt with its text, that is longer than the context or a row."""


class BatchError(SprinterError):
    """Some of many requests failed, each with its own error; the others were completed.

    Attributes:
        errors: exception of each failed request, by request number (``generate_batch``: by index of the prompt).
        done: results of the completed requests, by the same numbers.
        partial: results of the failed requests up to the error, with ``finish_reason`` "error".
    """

    def __init__(
        self, what: str, errors: Mapping[int, Exception], done: Mapping[int, Any], partial: Mapping[int, Any]
    ) -> None:
        first, *others = errors
        more = f"; {what} {', '.join(map(str, others))} failed too" if others else ""
        super().__init__(f"{what} {first} failed: {errors[first]}{more}")
        self.errors, self.done, self.partial = dict(errors), dict(done), dict(partial)


class EngineError(SprinterError):
    """An ``AsyncEngine`` does not take a request, or does not finish it; the request itself is not at fault."""


class QueueFullError(EngineError):
    """As many requests as the queue holds wait already, of all owners or of this one: try again later.

    Attributes:
        retry_after_s: time after which the requests that wait now will have got rows, at the pace of the last ones.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMemoryError(EngineError):
    """There is not enough memory for the request now: try again later."""


class ClosedEngineError(EngineError):
    """The engine is closed, or takes no more requests before it closes."""


class DeadEngineError(EngineError):
    """The engine's thread has stopped with an error, which is the cause; all of its requests fail."""


class ProfileWarning(UserWarning):
    """A profile of ``sprinter tune`` was made on another machine, or on other texts than those that use it."""
