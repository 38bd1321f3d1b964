"""Loads the pair that the options name, without the libraries' chatter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sprinter.cli.running import debugging

if TYPE_CHECKING:
    from sprinter.engine.pair import Pair

__all__ = ["load", "quiet_libraries"]


def load(
    target: str | None,
    draft: str | None,
    gate: str | None,
    heads: Sequence[str] = (),
    **options: str | bool | None,
) -> Pair:
    """As ``sprinter.load_pair``; options that are None are left to it."""
    quiet_libraries()
    from sprinter import load_pair

    given: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    return load_pair(target, draft=draft, gate=gate, heads=heads, **given)


def quiet_libraries() -> None:
    """No bars while weights are read, unless debugging; a terminal still shows the progress of a download."""
    if debugging():
        return
    from sprinter.models.bars import set_bars

    set_bars(weights=False, downloads=sys.stderr.isatty())
