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

from sprinter.models.quantised.library import floats, kernel
from sprinter.models.runners.masks import ORDERED

__all__ = ["Attention", "attend_in_order", "visible"]


_HIDDEN = -1e4  # additive masks hold less for keys that a query does not see


def attend_in_order(model: PreTrainedModel) -> None:
    """Make a model on the CPU use this attention; one that attends in a way of its own is left as it is."""
    takes_others = getattr(model, "_supports_attention_backend", False)  # else it may mask in its own code
    if takes_others and model.config._attn_implementation in ("sdpa", "eager"):
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = Attention.of(query.float(), key.float(), value.float(), attention_mask, scale, softcap or 0.0)
    made = floats(given.batch, given.n, given.heads, given.d_v)
    kernel().attention(ctypes.byref(given), made.data_ptr(), torch.get_num_threads())
    return made, None


_STEPS = ctypes.c_int64 * 3


def visible(mask: Tensor) -> Tensor:
    """Which keys a query sees, bool ``[1 or batch, 1, n, keys]``, of such a mask or of one that is added to the scores.

    Raises:
        NotImplementedError: there is one for each head.
    """
    if mask.shape[1] != 1:
        raise NotImplementedError("a mask for each head")
    return mask if mask.dtype == torch.bool else mask > _HIDDEN


class Attention(ctypes.Structure):
    """``Attention`` in attention.h."""

    _fields_ = (
        *(
            (f"{name}{end}", ctypes.c_void_p)
            for name in ("query", "key", "value", "mask")
            for end in ("", "_step")
        ),
        ("rows", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "kv", "n", "keys", "d", "d_v")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    )
    held: list[Any]

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        cap: float,
        rows: Tensor | None = None,
    ) -> Attention:
        """Attention of these float32 tensors, which it keeps in memory; shapes as in ``_attention``.

        Args:
            rows: int64 ``[batch]``, which rows of key and value the queries see, if these have other rows than query.
        """
        made = cls()
        batch, heads, n, d = query.shape
        if mask is None and n > 1:
            key, value = key[:, :, :n], value[:, :, :n]
        made.batch, made.heads, made.kv, made.n = batch, heads, key.shape[1], n
        made.keys, made.d, made.d_v = key.shape[2], d, value.shape[-1]
        made.scale, made.cap = scale, cap
        parts = {"query": query, "key": key, "value": value}
        if mask is not None:
            parts["mask"] = visible(mask)[:, 0].expand(batch, n, made.keys)
        made.held = []
        if rows is not None:
            made.held.append(rows)
            made.rows = rows.data_ptr()
        for name, part in parts.items():
            inner = part if part.stride(-1) == 1 else part.contiguous()
            steps = _STEPS(*inner.stride()[:-1])
            made.held += [inner, steps]
            setattr(made, name, inner.data_ptr())
            setattr(made, f"{name}_step", ctypes.addressof(steps))
        return made
