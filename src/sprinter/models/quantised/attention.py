"""Attention whose result for a query does not depend on the rest of the forward pass, to the bit.

Activations are rounded before quantised products, so that a difference in the last bit of a sum moves some of them by a
whole step. PyTorch's kernels for attention add in an order that depends on the number of queries: a token read alone
would then have another law than the same token read with five others, and exact methods would leave the text of plain
decoding.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from sprinter.models.quantised.library import kernel
from sprinter.models.runners.masks import ORDERED

__all__ = ["attend_in_order"]


def attend_in_order(model: PreTrainedModel) -> None:
    """Make a model on the CPU use this attention; one that attends in a way of its own is left as it is."""
    if model.config._attn_implementation in ("sdpa", "eager"):
        AttentionInterface.register(ORDERED, _attention)
        AttentionMaskInterface.register(ORDERED, sdpa_mask)
        model.config._attn_implementation = ORDERED


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query ``[batch, heads, n, d]``, key and value ``[batch, kv, keys, d]``, mask bool
    ``[1 or batch, 1, n, keys]`` or None -> ``[batch, n, heads, d_v]``."""
    if others.get("position_bias") is not None or others.get("s_aux") is not None or is_causal is False:
        raise NotImplementedError("attention with biases, sinks or without order")
    query, key, value = (_inner(part.float()) for part in (query, key, value))
    batch, heads, n, d = query.shape
    if attention_mask is None and n > 1:
        key, value = key[:, :, :n], value[:, :, :n]
    keys, kv = key.shape[2], key.shape[1]
    seen: Tensor | None = None
    mask_step: tuple[int, ...] = (0, 0)
    if attention_mask is not None:
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1e4
        seen = _inner(seen[:, 0].expand(batch, n, keys))
        mask_step = seen.stride()[:2]
    made = torch.empty(batch, n, heads, value.shape[-1])
    kernel().attention(
        query.data_ptr(), _longs(query.stride()[:3]), key.data_ptr(), _longs(key.stride()[:3]), value.data_ptr(),
        _longs(value.stride()[:3]), None if seen is None else seen.data_ptr(), _longs(mask_step),
        _longs((batch, heads, kv, n, keys, d, value.shape[-1])), d**-0.5 if scaling is None else scaling,
        softcap or 0.0, made.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return made, None


def _inner(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _longs(numbers: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)
