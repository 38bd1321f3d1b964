"""Weights of 4 to 8 bits in blocks: the kinds that GGUF files hold, and how other weights are rounded to them.

A weight is ``scale * (code - offset)``, or ``scale * code + minimum``. 32 codes (Q6_K: 16) share a scale. In the plain
kinds a scale is a 16-bit float; in the nested ones (K) an 8-bit integer times a 16-bit float that 256 codes share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMATS", "GROUP", "Blocks", "Format", "eight_bits", "four_bits"]

GROUP, SUPER = 32, 256

Blocks = NDArray[np.uint8]
"""Rows of a matrix as a GGUF file holds them, ``[out, bytes]``."""


class Format(NamedTuple):
    """How weights are stored: the name of the kind in GGUF, codes of a block, and its bytes."""

    name: str
    block: int
    bytes: int


FORMATS = {
    form.name: form
    for form in (
        Format("Q4_0", GROUP, 18),
        Format("Q4_1", GROUP, 20),
        Format("Q5_0", GROUP, 22),
        Format("Q5_1", GROUP, 24),
        Format("Q8_0", GROUP, 34),
        Format("Q4_K", SUPER, 144),
        Format("Q5_K", SUPER, 176),
        Format("Q6_K", SUPER, 210),
    )
}
"""By name; the order is that of ``with_format`` in products.h."""


def eight_bits(weight: NDArray[np.float32]) -> Blocks:
    """Round a matrix ``[out, in]`` to Q8_0; ``in`` is a multiple of 32.

    Raises:
        ValueError: weights that are not finite, or too large.
    """
    groups = weight.reshape(len(weight), -1, GROUP)
    largest = np.abs(groups).max(-1)
    scale = _halves(largest / 127)
    # Near zero, where 16-bit floats are coarse, a scale that is rounded down would cut weights off.
    short = scale.astype(np.float32) * 127 < largest * (1 - 2**-10)
    scale[short] = np.nextafter(scale[short], np.float16(np.inf))
    step = scale.astype(np.float32)[..., None]
    codes = np.divide(groups, step, out=np.zeros_like(groups), where=step > 0)
    codes = np.clip(np.rint(codes), -127, 127).astype(np.int8)
    return _blocks(scale, codes)


def four_bits(weight: NDArray[np.float32]) -> Blocks:
    """Round a matrix ``[out, in]`` to Q4_1: the scale and minimum of a group are fitted by least squares.

    Raises:
        ValueError: as ``eight_bits``.
    """
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
    scale, minimum = _halves(step[..., 0]), _halves(start[..., 0])
    codes = _round(groups, *(one.astype(np.float32)[..., None] for one in (scale, minimum)))
    nibbles = codes.astype(np.uint8)
    return _blocks(scale, minimum, nibbles[..., :16] | nibbles[..., 16:] << 4)


def _blocks(*parts: NDArray[np.float16] | NDArray[np.int8] | Blocks) -> Blocks:
    """Parts of blocks, each ``[out, blocks]`` or ``[out, blocks, bytes]``, one after the other."""
    whole = [(one if one.ndim == 3 else one[..., None]).view(np.uint8) for one in parts]
    return np.concatenate(whole, -1).reshape(len(parts[0]), -1)


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
