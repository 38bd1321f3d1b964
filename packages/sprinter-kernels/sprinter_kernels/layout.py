"""Weights of 4 to 8 bits in groups: the kinds that GGUF files hold, and how other weights are rounded to them.

A weight is ``scale * (code - offset)``, or ``scale * code - minimum``. 32 codes (Q6_K: 16) share a scale. In the plain
kinds a scale is a 16-bit float; in the nested ones (K) an 8-bit integer times a 16-bit float that 256 codes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["FORMATS", "GROUP", "Codes", "Format", "eight_bits", "four_bits", "joined"]

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
