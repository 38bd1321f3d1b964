"""What transformers calls the cache that a module is given.

``past_key_values`` until 5.23; ``cache`` from 5.24 on, where the old name gives warnings, and names its modules pass on
to each other are new ones. Layers of GPT-NeoX have had a name of their own throughout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import transformers
from torch import nn
from transformers import LlamaForCausalLM

from sprinter.errors import UserError

__all__ = ["cache_name", "model_cache_name"]

_NAMES = ("cache", "past_key_values", "layer_past")


def cache_name(module: type[nn.Module]) -> str:
    """The argument of a module's ``forward`` that is its cache.

    Raises:
        UserError: it has none of the names that are known.
    """
    if (name := _found(module.forward)) is None:
        raise UserError(
            f"transformers {transformers.__version__} calls the cache of {module.__name__} by a name that is not known "
            "here: install the version that constraints.txt names"
        )
    return name


@lru_cache(64)
def model_cache_name(forward: Callable[..., Any]) -> str:
    """The argument of a whole model's ``forward`` that is its cache.

    A model around another passes on what it is given, and names nothing.
    """
    return _found(forward) or cache_name(LlamaForCausalLM)


@lru_cache(64)
def _found(forward: Callable[..., Any]) -> str | None:
    arguments = inspect.signature(forward).parameters
    return next((name for name in _NAMES if name in arguments), None)
