"""Attention masks from lengths: views of one buffer for aligned rows, built on each call for ragged rows.

A mask is ``[1 or batch, 1, n, keys]``, in one of two forms: bool (True = visible) for scaled_dot_product_attention, and
additive in the model's dtype (0 = visible) for transformers' eager attention, which adds it to the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BOOLEAN", "Band", "ragged_mask", "window_mask"]

BOOLEAN = ("sdpa",)
"""Implementations of attention that take bool masks."""


def _in_form(visible: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return visible
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def ragged_mask(positions: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of queries at ``positions [batch, n]`` over the first ``keys`` keys: ``[batch, 1, n, keys]``.

    A query at position t sees keys max(0, t - window + 1)..t.
    """
    return window_mask(torch.arange(keys, device=positions.device), positions, window, dtype)


def window_mask(key: Tensor, positions: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask over keys at positions ``key``: ``[k]``, or ``[batch, n, k]`` if each query has its own."""
    query = positions[:, None, :, None]
    if key.dim() == 3:
        key = key[:, None]
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return _in_form(visible, dtype)


class Band:
    """Masks of aligned rows, as views: a call builds no tensor.

    The mask of n queries from ``start`` on depends only on key − query, so that all masks are windows of one buffer:
    row i, column x is visible iff x <= i + max_len (and x > i + max_len − window).
    """

    def __init__(self, max_len: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._max_len, self._window, self._dtype, self._device = max_len, window, dtype, device
        self._rows = 0
        self._buffer: Tensor | None = None

    def view(self, start: int, n: int) -> Tensor:
        """Mask ``[1, 1, n, start + n]`` of the queries at positions start..start+n−1."""
        if self._buffer is None or n > self._rows:
            self._buffer = self._build(n)
        return self._buffer[:, :, :n, self._max_len - start : self._max_len + n]

    def _build(self, n: int) -> Tensor:
        # Powers of two: short drafts need a small buffer, and growing drafts rebuild it rarely.
        self._rows = max(8, 1 << (n - 1).bit_length())
        positions = torch.arange(self._max_len, self._max_len + self._rows, device=self._device)[None]
        return ragged_mask(positions, self._max_len + self._rows, self._window, self._dtype)
