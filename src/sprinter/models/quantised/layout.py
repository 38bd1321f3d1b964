"""Weights of 4 to 8 bits in groups: the kinds that GGUF files hold, and how their blocks are taken apart.

A weight is ``scale * (code - offset)``, or ``scale * code - minimum``. 32 codes (Q6_K: 16) share a scale. In the plain
kinds a scale is a 16-bit float; in the nested ones (K) an 8-bit integer times a 16-bit float that 256 codes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMATS", "GROUP", "Codes", "Format", "eight_bits", "four_bits", "joined", "take_apart"]

GROUP, SUPER = 32, 256

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are stored.

    Attributes:
        name: as in GGUF.
        bits: of a code.
        scaled: codes that share a scale.
        nested: whether scales are 8-bit integers times a 16-bit float for 256 codes.
        minimum: whether there is a minimum beside the scale.
        bytes: of a block in a GGUF file.
    """

    name: str
    bits: int
    scaled: int
    nested: bool
    minimum: bool
    bytes: int

    @property
    def block(self) -> int:
        """Codes of a block in a GGUF file."""
        return SUPER if self.nested else GROUP


FORMATS = {
    form.name: form
    for form in (
        Format("Q4_0", 4, 32, False, False, 18),
        Format("Q4_1", 4, 32, False, True, 20),
        Format("Q5_0", 5, 32, False, False, 22),
        Format("Q5_1", 5, 32, False, True, 24),
        Format("Q8_0", 8, 32, False, False, 34),
        Format("Q4_K", 4, 32, True, True, 144),
        Format("Q5_K", 5, 32, True, True, 176),
        Format("Q6_K", 6, 16, True, False, 210),
    )
}
"""By name; the order is that of ``with_format`` in products.h."""


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix ``[out, in]`` of codes with their scales.

    Attributes:
        form: how it is stored.
        codes: ``[out, in]``, without sign.
        scale, minimum: float16 ``[out, in / 32]``, in the nested kinds ``[out, in / 256]``.
        fine, fine_minimum: 8-bit factors of the nested kinds, ``[out, in / scaled]``.
    """

    form: Format
    codes: Bytes
    scale: NDArray[np.float16]
    minimum: NDArray[np.float16] | None = None
    fine: NDArray[np.int8] | None = None
    fine_minimum: NDArray[np.int8] | None = None

    def weights(self) -> NDArray[np.float64]:
        """The weights ``[out, in]``."""
        form, scale, minimum = self.form, self.scale.astype(np.float64), None
        if self.minimum is not None:
            minimum = self.minimum.astype(np.float64)
        if self.fine is not None:
            scale = np.repeat(scale, SUPER // form.scaled, -1) * self.fine
        if minimum is not None and self.fine_minimum is not None:
            minimum = np.repeat(minimum, SUPER // form.scaled, -1) * self.fine_minimum
        codes = self.codes.astype(np.float64).reshape(*scale.shape, form.scaled)
        if minimum is None:
            codes = (codes - (1 << (form.bits - 1))) * scale[..., None]
        else:
            codes = codes * scale[..., None] - minimum[..., None]
        return codes.reshape(self.codes.shape)


def joined(parts: Sequence[Codes]) -> Codes:
    """Parts of a matrix, as one."""
    whole: dict[str, Any] = {}
    for part in fields(Codes)[1:]:
        found = [getattr(one, part.name) for one in parts]
        whole[part.name] = None if found[0] is None else np.concatenate(found)
    return Codes(parts[0].form, **whole)


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


def eight_bits(weight: NDArray[np.float32]) -> Codes:
    """Round a matrix ``[out, in]`` as Q8_0 does; ``in`` is a multiple of 32."""
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = np.abs(groups).max(-1)
    scale = _halves(largest / 127)
    # Near zero, where 16-bit floats are coarse, a scale that is rounded down would cut weights off.
    short = scale.astype(np.float32) * 127 < largest * (1 - 2**-10)
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    step = scale.astype(np.float32)[..., None]
    codes = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    codes = (np.clip(np.rint(codes), -127, 127) + 128).astype(np.uint8)
    return Codes(FORMATS["Q8_0"], codes.reshape(weight.shape), scale)


def four_bits(weight: NDArray[np.float32]) -> Codes:
    """Round a matrix ``[out, in]`` to Q4_1: the scale and minimum of a group are fitted by least squares."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    step, start = (high - low) / 15, low
    for _ in range(3):  # codes for the scale, then the scale for the codes
        codes = _round(groups, step, start)
        mean, middle = groups.mean(-1, keepdims=True), codes.mean(-1, keepdims=True)
        spread = ((codes - middle) ** 2).sum(-1, keepdims=True)
        slope = ((groups - mean) * (codes - middle)).sum(-1, keepdims=True)
        step = np.divide(slope, spread, out=step.copy(), where=spread > 0)
        start = mean - step * middle
    scale, minimum = _halves(step[..., 0]), _halves(-start[..., 0])
    codes = _round(groups, scale.astype(np.float32)[..., None], -minimum.astype(np.float32)[..., None])
    return Codes(FORMATS["Q4_1"], codes.astype(np.uint8).reshape(weight.shape), scale, minimum)


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        made = numbers.astype(np.float16)
    if not np.isfinite(made).all():
        raise ValueError("weights are not finite, or too large for scales of 16 bits")
    return made


def _round(
    groups: NDArray[np.float32], step: NDArray[np.float32], start: NDArray[np.float32]
) -> NDArray[np.float32]:
    codes = np.divide(groups - start, step, out=np.zeros_like(groups), where=step != 0)
    rounded: NDArray[np.float32] = np.clip(np.rint(codes), 0, 15)
    return rounded
