"""What caches need, and whether it is there."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from sprinter.errors import UserError
from sprinter.models.gguf import GgufModel

__all__ = ["cache_bytes", "check_memory", "free_bytes", "largest_batch"]

_SHARE = 0.9
"""Of the free memory, so much may go into caches; passes need some too."""


def cache_bytes(model: PreTrainedModel | GgufModel, max_len: int) -> int:
    """Bytes of keys and values of one row of ``max_len`` tokens, the spare slot included."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    d = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    dtype = model.cache_dtype if isinstance(model, GgufModel) else model.dtype
    return 2 * int(config.num_hidden_layers) * kv_heads * d * (max_len + 1) * dtype.itemsize


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return _available() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _available() -> int | None:
    """What Linux would give without swapping: free pages, and those that hold copies of files."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


def largest_batch(models: list[PreTrainedModel | GgufModel], max_len: int, budget_bytes: int) -> int:
    """How many rows of ``max_len`` tokens, in all of the models, a budget holds."""
    return budget_bytes // sum(cache_bytes(model, max_len) for model in models)


def check_memory(
    models: list[PreTrainedModel | GgufModel], batch: int, max_len: int, budget_bytes: int | None = None
) -> None:
    """Refuse caches that do not fit.

    Args:
        models: those that each row needs a cache in.
        batch, max_len: rows and their length.
        budget_bytes: what the caches may take; None: nine tenths of what is free now on each model's device.

    Raises:
        UserError: names the largest batch that fits.
    """
    if budget_bytes is not None:
        _check_budget(models, batch, max_len, budget_bytes)
        return
    for device in dict.fromkeys(torch.device(model.device) for model in models):
        free = free_bytes(device)
        if free is not None:
            there = [model for model in models if torch.device(model.device) == device]
            _check_budget(there, batch, max_len, int(_SHARE * free))


def _check_budget(
    models: list[PreTrainedModel | GgufModel], batch: int, max_len: int, budget_bytes: int
) -> None:
    fits = largest_batch(models, max_len, budget_bytes)
    if batch <= fits:
        return
    need = batch * sum(cache_bytes(model, max_len) for model in models)
    mend = f"use a batch of {fits} or less, or shorter rows" if fits else "use shorter rows"
    raise UserError(
        f"the caches of {batch} rows of {max_len} tokens need {need / 1e9:.2f} GB and may take "
        f"{budget_bytes / 1e9:.2f} GB: {mend}"
    )
