"""Blocks of GGUF files taken apart with NumPy: what pack.h does, written out for tests."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("sprinter_kernels", reason="the kernels are not installed")
from sprinter_kernels.layout import Codes, Format

__all__ = ["take_apart"]

Bytes = NDArray[np.uint8]


def take_apart(stored: Bytes, form: Format) -> Codes:
    """Codes and scales of rows of a GGUF tensor.

    Args:
        stored: ``[out, bytes of a row]``.
        form: kind of the tensor.
    """
    rows = len(stored)
    blocks = stored.reshape(rows, -1, form.bytes)
    if form.name == "Q6_K":
        return _six(blocks, form)
    if form.nested:
        return _nested(blocks, form)
    scale, at = _half(blocks, 0), 2
    minimum = None
    if form.minimum:
        minimum, at = -_half(blocks, 2), 4  # stored as what is added
    if form.bits == 8:
        codes: Bytes = blocks[..., 2:] ^ np.uint8(0x80)
    else:
        if form.bits == 5:
            fifth = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
            at += 4
        nibbles = blocks[..., at:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], -1)
        if form.bits == 5:
            codes |= fifth << 4
    return Codes(form, codes.reshape(rows, -1), scale, minimum)


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nested(blocks: Bytes, form: Format) -> Codes:
    """Q4_K and Q5_K: 12 bytes hold eight scales and eight minima of 6 bits."""
    rows, low = len(blocks), blocks[..., 4:16]
    first, second, rest = low[..., :4], low[..., 4:8], low[..., 8:]
    fine = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], -1)
    fine_minimum = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], -1)
    nibbles = blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([nibbles & 15, nibbles >> 4], -2)  # [out, blocks, 4, 2, 32]
    if form.bits == 5:
        fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # [out, blocks, 8, 32]
        codes |= (fifth << 4).reshape(codes.shape)
    return Codes(
        form, codes.reshape(rows, -1), _half(blocks, 0), _half(blocks, 2),
        fine.reshape(rows, -1).astype(np.int8), fine_minimum.reshape(rows, -1).astype(np.int8),
    )  # fmt: skip


def _six(blocks: Bytes, form: Format) -> Codes:
    """Q6_K: 128 bytes of low and 64 of high bits, 16 scales of 8 bits."""
    rows = len(blocks)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    low = (low >> np.array([0, 4], np.uint8)[:, None]) & np.uint8(15)  # [out, blocks, 2, 2, 64]
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & np.uint8(3)  # [out, blocks, 2, 4, 32]
    codes: Bytes = low.reshape(high.shape) | (high << np.uint8(4))
    fine = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    return Codes(form, codes.reshape(rows, -1), _half(blocks, 208), None, fine.reshape(rows, -1))
