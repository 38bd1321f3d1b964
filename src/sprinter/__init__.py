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

from sprinter.lazy import lazy_names
from sprinter.version import __version__ as __version__

# Loaded when first used: the command line answers --help without waiting for torch and transformers.
if TYPE_CHECKING:
    from sprinter.decode.draft import Origin as Origin
    from sprinter.decode.draft import Stats as Stats
    from sprinter.decode.draft import Token as Token
    from sprinter.decode.method import Method as Method
    from sprinter.engine.astream import AsyncStream as AsyncStream
    from sprinter.engine.async_engine import AsyncEngine as AsyncEngine
    from sprinter.engine.engine import Engine as Engine
    from sprinter.engine.generation import Generation as Generation
    from sprinter.engine.options import GenerationKeywords as GenerationKeywords
    from sprinter.engine.options import GenerationOptions as GenerationOptions
    from sprinter.engine.pair import Pair as Pair
    from sprinter.engine.pair import Stream as Stream
    from sprinter.engine.pair import load_pair as load_pair
    from sprinter.engine.policy import Policy as Policy
    from sprinter.engine.rollout import Rollout as Rollout
    from sprinter.engine.scheduler import Event as Event
    from sprinter.errors import BatchError as BatchError
    from sprinter.errors import EngineError as EngineError
    from sprinter.errors import SprinterError as SprinterError
    from sprinter.errors import UserError as UserError
    from sprinter.models.pair import builtin_paths as builtin_paths
    from sprinter.parameters import Sampling as Sampling

__getattr__, __dir__, __all__ = lazy_names(__name__)
__all__ += ["methods"]


def methods() -> list[dict[str, Any]]:
    """Every registered method at its defaults: name, spec, trust, stop, accept, lossless, paper."""
    from sprinter.decode.spec import method_table

    return method_table()
