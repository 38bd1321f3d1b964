"""Memory that KV caches need, and whether it is free."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from sprinter.errors import RowsError, UserError
from sprinter.models.interface import ServedModel
from sprinter.models.kernels import cache_token_bytes, packed_weights, rows_dtype_of
from sprinter.models.runners.forward import call_model, head_of

__all__ = ["cache_bytes", "check_memory", "free_bytes", "token_bytes", "weight_storages"]

_SHARE = 0.9
"""Share of the free memory that caches may take; the forward passes need the rest."""


_token_states: WeakKeyDictionary[PreTrainedModel, list[Tensor]] = WeakKeyDictionary()


def token_bytes(model: PreTrainedModel | ServedModel) -> int:
    """Bytes of one token's keys and values in all layers; measured by a forward pass where transformers keeps them."""
    if isinstance(model, ServedModel):
        return model.token_bytes
    if (known := cache_token_bytes(model)) is not None:
        return known
    if model not in _token_states:
        _token_states[model] = _measured(model)
    dtype = rows_dtype_of(model)
    return sum(part.numel() * (dtype or part.dtype).itemsize for part in _token_states[model])


def _measured(model: PreTrainedModel) -> list[Tensor]:
    """Keys and values of one token."""
    cache = DynamicCache()
    with torch.inference_mode():
        call_model(
            model, head_of(model), torch.zeros(1, 1, dtype=torch.long, device=model.device), None, cache=cache
        )
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    return [part for layer in layers for part in (layer.keys, layer.values) if part is not None]


def weight_storages(model: PreTrainedModel | ServedModel) -> dict[int, int]:
    """Bytes of a model's weights, by where they are: weights that two models share are at the same place."""
    if isinstance(model, ServedModel):
        path = getattr(model, "path", None)
        return {id(model): path.stat().st_size} if isinstance(path, Path) else {}
    tensors = [*model.parameters(), *model.buffers(), *packed_weights(model)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {one.data_ptr(): one.nbytes() for one in storages}


def cache_bytes(model: PreTrainedModel | ServedModel, max_len: int) -> int:
    """Bytes of keys and values of one row of ``max_len`` tokens and its spare slot."""
    return token_bytes(model) * (max_len + 1)


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device in bytes; None if it is unknown."""
    if device.type == "cuda":
        # reserved by torch's allocator, but free
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    try:  # what Linux can allocate without swapping: free pages and the page cache
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(
    models: Sequence[PreTrainedModel | ServedModel],
    batch: int,
    lengths: Sequence[int],
    budget_bytes: int | None = None,
    beside: Sequence[int] | None = None,
) -> None:
    """Refuse caches that do not fit into memory.

    Args:
        models: the models in which each row needs a cache.
        batch: number of rows.
        lengths: of a row in each model.
        budget_bytes: memory that the caches may take; None: nine tenths of the free memory of each model's device.
        beside: bytes that a row needs in each model beside its cache; None: 0.

    Raises:
        UserError: names the largest batch that fits.
    """
    devices: dict[
        torch.device | None, list[tuple[int, int]]
    ] = {}  # by device, or all: length and bytes of each row
    for model, length, more in zip(models, lengths, beside or [0] * len(models), strict=True):
        place = torch.device(model.device) if budget_bytes is None else None
        devices.setdefault(place, []).append((length, cache_bytes(model, length) + more))
    for device, caches in devices.items():
        free = budget_bytes if device is None else free_bytes(device)
        if free is not None:
            _check_budget(caches, batch, free if device is None else int(_SHARE * free))


def _check_budget(caches: Sequence[tuple[int, int]], batch: int, budget_bytes: int) -> None:
    longest, row_bytes = max(length for length, _ in caches), sum(size for _, size in caches)
    fits = budget_bytes // row_bytes
    if batch <= fits:
        return
    less = f"use a batch of {fits} or less, or shorter rows"
    raise (RowsError if fits else UserError)(
        f"the caches of {batch} rows of {longest} tokens need {batch * row_bytes / 1e9:.2f} GB and may take "
        f"{budget_bytes / 1e9:.2f} GB: {less if fits else 'use shorter rows (a smaller max_new_tokens)'}"
    )
