"""Memory that KV caches need, and whether it is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sprinter.errors import RowsError, UserError
from sprinter.models.interface import ServedModel
from sprinter.models.runners.forward import call_model

__all__ = ["cache_bytes", "check_memory", "free_bytes", "largest_batch", "token_bytes"]

_SHARE = 0.9
"""Share of the free memory that caches may take; the forward passes need the rest."""


_token_bytes: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def token_bytes(model: PreTrainedModel | ServedModel) -> int:
    """Bytes of one token's keys and values in all layers; measured by a forward pass for transformers models."""
    if isinstance(model, ServedModel):
        return model.token_bytes
    if model not in _token_bytes:
        _token_bytes[model] = _measured(model)
    return _token_bytes[model]


def _measured(model: PreTrainedModel) -> int:
    cache = DynamicCache()
    with torch.inference_mode():
        call_model(model, torch.zeros(1, 1, dtype=torch.long, device=model.device), None, cache=cache)
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    states = [part for layer in layers for part in (layer.keys, layer.values) if part is not None]
    return sum(part.numel() * part.element_size() for part in states)


def cache_bytes(model: PreTrainedModel | ServedModel, max_len: int) -> int:
    """Bytes of keys and values of one row of ``max_len`` tokens and its spare slot."""
    return token_bytes(model) * (max_len + 1)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if it is unknown."""
    if device.type == "cuda":
        # reserved by torch's allocator, but free
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return _available() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _available() -> int | None:
    """Bytes that Linux can allocate without swapping: free pages and the page cache; None if it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return None


_AnyModel = PreTrainedModel | ServedModel


def largest_batch(models: list[_AnyModel], max_len: int | Sequence[int], budget_bytes: int) -> int:
    """Largest number of rows of ``max_len`` tokens (one length, or one per model) whose caches fit into a budget."""
    return budget_bytes // _row_bytes(_with_lengths(models, max_len))


def _with_lengths(models: list[_AnyModel], max_len: int | Sequence[int]) -> list[tuple[_AnyModel, int]]:
    lengths = [max_len] * len(models) if isinstance(max_len, int) else max_len
    return list(zip(models, lengths, strict=True))


def _row_bytes(caches: Sequence[tuple[_AnyModel, int]]) -> int:
    return sum(cache_bytes(model, length) for model, length in caches)


def check_memory(
    models: list[_AnyModel], batch: int, max_len: int | Sequence[int], budget_bytes: int | None = None
) -> None:
    """Refuse caches that do not fit into memory.

    Args:
        models: the models in which each row needs a cache.
        batch: number of rows.
        max_len: length of the rows, one for all models or one per model.
        budget_bytes: memory that the caches may take; None: nine tenths of the free memory of each model's device.

    Raises:
        UserError: names the largest batch that fits.
    """
    caches = _with_lengths(models, max_len)
    if budget_bytes is not None:
        _check_budget(caches, batch, budget_bytes)
        return
    for device in dict.fromkeys(torch.device(model.device) for model in models):
        free = free_bytes(device)
        if free is not None:
            there = [(model, length) for model, length in caches if torch.device(model.device) == device]
            _check_budget(there, batch, int(_SHARE * free))


def _check_budget(caches: Sequence[tuple[_AnyModel, int]], batch: int, budget_bytes: int) -> None:
    row_bytes = _row_bytes(caches)
    fits = budget_bytes // row_bytes
    if batch <= fits:
        return
    longest = max(length for _, length in caches)
    fix = (
        f"use a batch of {fits} or less, or shorter rows"
        if fits
        else "use shorter rows (a smaller max_new_tokens)"
    )
    raise (RowsError if fits else UserError)(
        f"the caches of {batch} rows of {longest} tokens need {batch * row_bytes / 1e9:.2f} GB and may take "
        f"{budget_bytes / 1e9:.2f} GB: {fix}"
    )
