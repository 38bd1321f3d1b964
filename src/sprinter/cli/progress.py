"""Progress on standard error, for every command that takes long."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

_EVERY_S = 20  # between lines if standard error is not a terminal


class Progress:
    """A bar on a terminal; elsewhere a line when a stage begins, every 20 seconds, and when it ends.

    A context manager; call it with what is going on, steps done and steps in total (0: unknown).

    Args:
        shown: False: show nothing.
    """

    def __init__(self, *, shown: bool = True) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False), console=Console(stderr=True),
            disable=not shown or not sys.stderr.isatty(), transient=True,
        )  # fmt: skip
        self._shown, self._task = shown, self._bar.add_task("", total=None)
        self._began, self._first, self._done, self._said, self._note = time.monotonic(), 0, -1, 0.0, ""

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, note: str, done: int = 0, wanted: int = 0) -> None:
        self._bar.update(self._task, completed=done, total=wanted or None, description=note)
        now, again = time.monotonic(), note == self._note
        if self._done < 0 or done < self._done:  # the next stage begins
            self._first, self._began = done, now
        self._done, self._note = done, note
        if not self._shown or not self._bar.disable or (not wanted and again):
            return
        if now - self._said > _EVERY_S or done >= wanted:
            self._said = now
            rate = (now - self._began) / max(1, done - self._first)
            left = f", about {rate * (wanted - done) / 60:.1f} min left" if done > self._first else ""
            print(f"{done}/{wanted}{left}: {note}" if wanted else note, file=sys.stderr, flush=True)
