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

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sprinter.errors import BatchError, SprinterError, UserError

if TYPE_CHECKING:
    from sprinter.decode.draft import Origin, Stats, Token
    from sprinter.decode.methods import Method
    from sprinter.engine.batch import Event
    from sprinter.engine.engine import Engine
    from sprinter.engine.generation import Generation
    from sprinter.engine.pair import Pair, Stream, load_pair
    from sprinter.engine.policy import Policy
    from sprinter.laws import Sampling
    from sprinter.models.pair import builtin_paths

__version__ = "0.1.0"
__all__ = [
    "BatchError",
    "Engine",
    "Event",
    "Generation",
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
_HOMES = {
    "Engine": "sprinter.engine.engine",
    "Event": "sprinter.engine.batch",
    "Generation": "sprinter.engine.generation",
    "Method": "sprinter.decode.methods",
    "Origin": "sprinter.decode.draft",
    "Pair": "sprinter.engine.pair",
    "Policy": "sprinter.engine.policy",
    "Sampling": "sprinter.laws",
    "Stats": "sprinter.decode.draft",
    "Stream": "sprinter.engine.pair",
    "Token": "sprinter.decode.draft",
    "builtin_paths": "sprinter.models.pair",
    "load_pair": "sprinter.engine.pair",
}


def methods() -> list[dict[str, Any]]:
    """Every registered method at its defaults: name, spec, trust, stop, accept, lossless, paper."""
    from sprinter.decode.methods import method_table

    return method_table()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sprinter' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
