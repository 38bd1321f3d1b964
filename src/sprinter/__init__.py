"""Sprinter: speculative decoding with a dial.

A small draft model writes, a large target model is asked as rarely as the user allows, and the user always sees the
price: speed on one axis, drift from the target's distribution on the other.

    >>> import sprinter
    >>> pair = sprinter.load_pair()  # the built-in pair, no network
    >>> out = pair.generate("The river rises in", method="sprinter", max_new_tokens=8)
    >>> len(out.tokens)
    8
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sprinter.errors import BatchError, EngineError, SprinterError, UserError
from sprinter.lazy import lazy_names
from sprinter.version import __version__ as __version__

if TYPE_CHECKING:
    from sprinter.decode.draft import Origin, Stats, Token
    from sprinter.decode.method import Method
    from sprinter.engine.astream import AsyncStream
    from sprinter.engine.async_engine import AsyncEngine
    from sprinter.engine.engine import Engine
    from sprinter.engine.generation import Generation
    from sprinter.engine.options import GenerationKeywords, GenerationOptions
    from sprinter.engine.pair import Pair, Stream, load_pair
    from sprinter.engine.policy import Policy
    from sprinter.engine.scheduler import Event
    from sprinter.models.pair import builtin_paths
    from sprinter.parameters import Sampling

__all__ = [
    "AsyncEngine",
    "AsyncStream",
    "BatchError",
    "Engine",
    "EngineError",
    "Event",
    "Generation",
    "GenerationKeywords",
    "GenerationOptions",
    "Method",
    "Origin",
    "Pair",
    "Policy",
    "Sampling",
    "SprinterError",
    "Stats",
    "Stream",
    "Token",
    "UserError",
    "builtin_paths",
    "load_pair",
    "methods",
]

# Loaded when first used: the command line answers --help without waiting for torch and transformers.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "sprinter.decode.draft": ("Origin", "Stats", "Token"),
        "sprinter.decode.method": ("Method",),
        "sprinter.engine.scheduler": ("Event",),
        "sprinter.engine.astream": ("AsyncStream",),
        "sprinter.engine.async_engine": ("AsyncEngine",),
        "sprinter.engine.engine": ("Engine",),
        "sprinter.engine.generation": ("Generation",),
        "sprinter.engine.options": ("GenerationKeywords", "GenerationOptions"),
        "sprinter.engine.pair": ("Pair", "Stream", "load_pair"),
        "sprinter.engine.policy": ("Policy",),
        "sprinter.models.pair": ("builtin_paths",),
        "sprinter.parameters": ("Sampling",),
    },
)


def methods() -> list[dict[str, Any]]:
    """Every registered method at its defaults: name, spec, trust, stop, accept, lossless, paper."""
    from sprinter.decode.spec import method_table

    return method_table()
