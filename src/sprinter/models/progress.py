"""Progress bars of transformers and the hub, shown on terminals only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging

__all__ = ["bars_on_terminals", "set_bars"]


def set_bars(weights: bool, downloads: bool) -> None:
    """Switch progress bars on or off: of transformers while it reads weights, of the hub while it downloads files."""
    if weights:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    else:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # Set the hub's own switch last, because transformers' switch changes it too.
    if downloads:
        enable_progress_bars()
    else:
        disable_progress_bars()


@contextmanager
def bars_on_terminals() -> Iterator[None]:
    """Context without progress bars unless standard error is a terminal; restores the user's settings on exit."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    before = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    set_bars(weights=False, downloads=False)
    try:
        yield
    finally:
        set_bars(*before)
