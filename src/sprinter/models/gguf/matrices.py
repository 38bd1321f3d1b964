"""The matrices of a GGUF file for our kernels: as they are stored, or rounded to 8 or 4 bits row by row.

The model in float32 is never in memory: peak memory is that of the packed matrices, and of a thousand rows for each of
at most four threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.cachedir import hash_file
from sprinter.models.gguf import tensors as tensors_module
from sprinter.models.gguf.packed import packed_matrices
from sprinter.models.gguf.tensors import HEAD, Places, Tensors
from sprinter.models.kernels import BITS, GGUF, kernels

__all__ = ["known_words", "matrices"]

_ROWS = 1024  # that are rounded at a time, whole blocks of channels
_THREADS = 4  # that round at once
_FORMS = {8: "Q8_0", 4: "Q4_1"}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A matrix before it is packed.

    Attributes:
        facts: what tells it from others of its name and size. form: of the packed matrix.
        high, padded, width: as ``Matrix`` has them. pack: packs it, into memory of its size.
    """

    facts: str
    form: Any
    high: int
    padded: int
    width: int
    pack: Callable[[Tensor], object]

    @property
    def size(self) -> int:
        size: int = kernels("native").packed_size(self.form, self.high, self.padded)
        return size

    def matrix(self, packed: Tensor | None = None) -> Any:
        """The matrix, packed now unless it is already."""
        if packed is None:
            self.pack(packed := kernels("native").room(self.size))
        return kernels("layers").Matrix(packed, self.form, self.high, self.padded, self.width)


def matrices(place: Places, tensors: Tensors, dtype: str) -> dict[str, Any]:
    """The quantised matrices by the paths of their layers; tied ones are shared.

    Args:
        dtype: "gguf": as they are stored; "int8", "int4": rounded (see ``quantise``).

    Raises:
        UserError: weights cannot be rounded. ValueError: a layer's matrix is stored in another way.
    """
    layers = kernels("quantise").replaceable(place.skeleton)
    stored = {layer: place.stored(f"{layer}.weight") for layer in layers}
    first = {name: layer for layer, name in reversed(stored.items())}  # the layer that says how it is read
    wanted = {}
    for name, layer in first.items():
        shape = tuple(layers[layer].weight.shape)
        order = place.in_order(layer + ".", torch.arange(shape[0])).numpy()
        wanted[name] = _wanted(tensors, name, shape, order, _bits(place, stored, name, dtype))
    names = [*wanted]
    facts = [
        tensors.fingerprint(),
        version("gguf"),
        *(
            hash_file(Path(file))
            for file in (__file__, tensors_module.__file__, kernels("quantise").__file__)
        ),
        *(wanted[name].facts for name in names),
    ]
    packed = packed_matrices(
        tensors.source, dtype, facts, [wanted[name].size for name in names],
        lambda i, made: wanted[names[i]].pack(made),
    )  # fmt: skip
    made = {name: wanted[name].matrix(None if packed is None else packed[i]) for i, name in enumerate(names)}
    return {layer: made[name] for layer, name in stored.items()}


def known_words(place: Places, tensors: Tensors, ids: Tensor, dtype: str) -> Any:
    """The rows of the output layer for these tokens."""
    config, name = place.config, place.stored(HEAD)
    bits = None if dtype == GGUF else 8
    return _wanted(tensors, name, (config.vocab_size, config.hidden_size), ids.numpy(), bits).matrix()


def _bits(place: Places, stored: dict[str, str], name: str, dtype: str) -> int | None:
    """Bits that a matrix is rounded to, 8 at both ends of a model; None: as it is stored."""
    if dtype == GGUF:
        return None
    model = place.skeleton
    ends = kernels("quantise").ends_of(model)
    uses = [model.get_submodule(layer) for layer, tensor in stored.items() if tensor == name]
    return 8 if any(id(use) in ends for use in uses) else BITS[dtype]


def _wanted(
    tensors: Tensors, name: str, shape: tuple[int, ...], order: NDArray[np.int64], bits: int | None
) -> _Wanted:
    """These rows of a tensor of this shape, in this order."""
    high, width, native, quantise = len(order), shape[1], kernels("native"), kernels("quantise")
    facts = f"{name} {tensors.place(name)} {shape} {bits} {hashlib.sha256(order.tobytes()).hexdigest()}"
    if bits is None:
        form, blocks = tensors.blocks(name, *shape)
        return _Wanted(
            facts + form.name, form, high, width, width,
            lambda made: native.pack_stored(blocks, form, order, made),
        )  # fmt: skip
    tensors.check(name, *shape)
    form, wide = kernels("layout").FORMATS[_FORMS[bits]], quantise.padded(width)

    def pack(made: Tensor) -> None:
        def part(start: int) -> None:
            values = tensors.rows(name, order[start : start + _ROWS])
            try:
                codes = quantise.ROUND[bits](np.pad(values, ((0, 0), (0, wide - width))))
            except ValueError as error:
                raise UserError(
                    f"{tensors.source.path.name} cannot be quantised: in {name}, {error}: use bfloat16"
                ) from error
            begin = native.packed_size(form, start, wide)
            native.pack_codes(
                codes, made[begin : begin + native.packed_size(form, len(values), wide)], threads=1
            )

        with ThreadPoolExecutor(
            min(_THREADS, torch.get_num_threads())
        ) as pool:  # NumPy works without the lock
            list(pool.map(part, range(0, high, _ROWS)))

    return _Wanted(facts, form, high, wide, width, pack)
