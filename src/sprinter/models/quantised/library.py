"""The kernels of ``packages/sprinter-kernels``, which is built when it is installed, not when it is used."""

from __future__ import annotations

import ctypes
import mmap as mmap_module
import os
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sprinter.errors import UserError
from sprinter.models.quantised.layout import FORMATS, GROUP, Codes, Format

__all__ = [
    "CHANNELS",
    "FLOATS",
    "NUMBER",
    "Kernel",
    "MatrixFacts",
    "check_products",
    "floats",
    "kernel",
    "layout",
    "library_name",
    "room",
    "why_no_kernels",
]

NUMBER = {name: i for i, name in enumerate(FORMATS)}
"""Kind of weights -> its number in ``with_format``."""
CHANNELS = 16
"""Rows of a block of a packed matrix."""
FLOATS = {torch.float32: len(FORMATS), torch.bfloat16: len(FORMATS) + 1}
"""Kinds of weights that are read as they are -> their numbers in floats.h."""
_NO_ROW = -2  # of a function of kernels.cpp
_TRIED = 85  # rows of the products that are checked: more than are multiplied together, and no multiple


class MatrixFacts(ctypes.Structure):
    """``Matrix`` in kernels.cpp."""

    _fields_ = (
        ("format", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("high", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("run", ctypes.c_int64),
        ("step", ctypes.c_int64),
    )


class Kernel:
    """The functions of kernels.cpp.

    Args:
        path: the compiled library.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise UserError(
                f"the compiled products in {path} cannot be loaded ({error}): see that the folder may hold "
                "programs, or set SPRINTER_CACHE to another"
            ) from error
        size, at, small = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        for name, kinds in {
            "bytes": [small, size, size],
            "pack": [small, *[at] * 5, size, size, at, small],
            "pack_stored": [small, at, at, size, size, at, small],
            "product": [small, at, size, size, at, size, at, at, small],
            "rows": [small, at, size, at, size, at],
            "attention": [at, at, small],
            "before": [at, at, size, *[at] * 5, small],
            "after": [at, at, at, size, at, small],
            "layers": [at, size, *[at] * 4, size, at, size, at, at, small],
            "norm": [at, at, size, size, ctypes.c_double, at],
            "pass": [at, at, size, size, size, *[at] * 6, size, size, at, size, size, *[at] * 3, small],
        }.items():
            function = getattr(library, f"sprinter_{name}")
            function.restype, function.argtypes, function.errcheck = size, kinds, _check_memory
        self._bytes = library.sprinter_bytes
        self._pack, self._pack_stored = library.sprinter_pack, library.sprinter_pack_stored
        self._product, self._rows = library.sprinter_product, library.sprinter_rows
        self.attention = library.sprinter_attention  # see attention.py
        self.before, self.after = library.sprinter_before, library.sprinter_after  # see whole.py
        self.layers = library.sprinter_layers
        self.norm, self.run_pass = library.sprinter_norm, library.sprinter_pass  # see straight.py

    def pack(self, codes: Codes, made: Tensor | None = None, threads: int | None = None) -> Tensor:
        """A matrix ``[out, in]`` in the order in which the kernel reads it, uint8; into ``made``.

        Args:
            threads: None: PyTorch's number.

        Raises:
            ValueError: its parts do not fit its kind.
        """
        (high, width), form = codes.codes.shape, codes.form
        if width % form.block:
            raise ValueError(
                f"{form.name} weights come in whole blocks of {form.block}, not in rows of {width}"
            )
        if form.minimum != (codes.minimum is not None) or form.nested != (codes.fine is not None):
            raise ValueError(f"{form.name} weights have other scales and minima than these")
        kind = NUMBER[codes.form.name]
        parts = (codes.codes, codes.scale, codes.minimum, codes.fine, codes.fine_minimum)
        whole = [None if part is None else np.ascontiguousarray(part) for part in parts]
        made = self._into(made, self.size(form, high, width))
        addresses = [None if part is None else part.ctypes.data for part in whole]
        self._pack(kind, *addresses, high, width, made.data_ptr(), threads or torch.get_num_threads())
        return made

    def size(self, form: Format, high: int, width: int) -> int:
        """Bytes of a packed matrix."""
        return int(self._bytes(NUMBER[form.name], high, width))

    @staticmethod
    def _into(made: Tensor | None, size: int) -> Tensor:
        if made is None:
            return room(size)
        assert made.numel() == size, (made.numel(), size)
        return made

    def pack_stored(
        self,
        stored: NDArray[np.uint8],
        form: Format,
        order: NDArray[np.int64],
        made: Tensor | None = None,
    ) -> Tensor:
        """As ``pack``, from the rows of a tensor in a GGUF file, ``[out, bytes]``, in this order; into ``made``."""
        high, width = len(order), stored.shape[1] // form.bytes * form.block
        made = self._into(made, self.size(form, high, width))
        rows = np.ascontiguousarray(stored)
        self._pack_stored(
            NUMBER[form.name], rows.ctypes.data, np.ascontiguousarray(order).ctypes.data, high, width,
            made.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return made

    def product(self, packed: Tensor, form: Format, high: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """``[n, in]`` float32, contiguous -> ``[n, high]``, with the bias ``[high]`` added."""
        return self._times(NUMBER[form.name], packed, high, x, bias)

    def product_in_place(self, weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """As ``product``, with a matrix ``[high, in]`` of ``FLOATS``, contiguous; ``in`` is a multiple of 16."""
        return self._times(FLOATS[weight.dtype], weight, len(weight), x, bias)

    def _times(self, kind: int, matrix: Tensor, high: int, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, width = x.shape
        made = floats(rows, high)
        self._product(
            kind, matrix.data_ptr(), high, width, x.data_ptr(), rows, None if bias is None else bias.data_ptr(),
            made.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return made

    def rows(self, packed: Tensor, form: Format, width: int, ids: Tensor) -> Tensor:
        """The rows ``ids`` ``[n]`` int64, contiguous, as float32 ``[n, width]``."""
        made = floats(len(ids), width)
        self._rows(NUMBER[form.name], packed.data_ptr(), width, ids.data_ptr(), len(ids), made.data_ptr())
        return made


def _check_memory(found: int, function: object, given: object) -> int:
    if found == _NO_ROW:
        raise IndexError("a token id has no row in the model's embedding")
    if found < 0:
        raise MemoryError("no memory for the activations of a forward pass with quantised weights")
    return found


def floats(*shape: int) -> Tensor:
    """Room for float32 numbers in the CPU's memory, whatever PyTorch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def room(size: int) -> Tensor:
    """Memory for ``size`` bytes, in large pages if the system has them, which are found faster."""
    if os.name != "posix":
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    held = mmap(-1, size, flags=mmap_module.MAP_PRIVATE | mmap_module.MAP_ANONYMOUS)  # shared memory has none
    if hasattr(mmap_module, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            held.madvise(mmap_module.MADV_HUGEPAGE)
    return torch.frombuffer(held, dtype=torch.uint8)


@cache
def kernel() -> Kernel:
    """The kernels for this CPU.

    Raises:
        UserError: they are not installed, or their products are wrong.
    """
    made = Kernel(_kernels().kernel_file())
    check_products(made)
    return made


def why_no_kernels() -> str | None:
    """Why there are no kernels for this CPU, and how to get them; None: there are."""
    try:
        kernel()
    except UserError as error:
        return str(error)
    return None


def library_name() -> str:
    """What tells the kernels in use from others: their version and instruction set.

    Raises:
        UserError: as ``kernel``.
    """
    return (
        f"sprinter-kernels {version('sprinter-kernels')}, {_kernels().kernel_file().stem.partition('_')[2]}"
    )


def layout() -> int:
    """Version of the order in which packed matrices hold their weights."""
    made: int = _kernels().LAYOUT
    return made


def _kernels() -> Any:
    try:
        module = import_module("sprinter_kernels")
        module.kernel_file()
    except ImportError as error:
        raise UserError(
            "weights of 4 and 8 bits, and compile=True, need our kernels, which are not installed: "
            "pip install ./packages/sprinter-kernels in a clone, which takes a C++ compiler, or use "
            "dtype=bfloat16 or float32 with compile=False"
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"our kernels cannot be loaded: {error}") from error
    return module


def check_products(made: Kernel) -> None:
    """Compare products of each kind with those of NumPy.

    Raises:
        UserError: they differ.
    """
    chance = np.random.default_rng(0)
    for form in FORMATS.values():
        codes = _example(form, chance)
        packed, (high, width) = made.pack(codes), codes.codes.shape
        weights = torch.from_numpy(codes.weights())
        if not torch.allclose(
            made.rows(packed, form, width, torch.arange(high)).double(), weights, rtol=1e-6
        ):
            raise UserError(
                f"{form.name} weights are unpacked wrongly on this processor: use dtype=bfloat16 or float32"
            )
        x = torch.from_numpy(chance.standard_normal((_TRIED, width)).astype(np.float32))
        x[0] = 1.0  # its sums are the largest
        groups = x.double().view(_TRIED, -1, GROUP)
        step = groups.abs().amax(-1, keepdim=True) / 127
        wanted = ((groups / step).round() * step).view(_TRIED, width) @ weights.T
        found = made.product(packed, form, high, x, None)
        few = torch.cat([made.product(packed, form, high, rows, None) for rows in torch.split(x, 7)])
        far = float((found.double() - wanted).abs().max())
        if not far <= 1e-4 * float(wanted.abs().max()) or not torch.equal(found, few):
            raise UserError(
                f"the products of {form.name} weights are wrong on this processor: use dtype=bfloat16 or float32"
            )
    for dtype in FLOATS:
        weight = torch.from_numpy(chance.standard_normal((21, 96)).astype(np.float32)).to(dtype)
        x = torch.from_numpy(chance.standard_normal((11, 96)).astype(np.float32))
        wanted = x.double() @ weight.double().T
        if not torch.allclose(made.product_in_place(weight, x, None).double(), wanted, atol=1e-4):
            raise UserError(f"the products of {dtype} weights are wrong on this processor: use compile=False")


def _example(form: Format, chance: np.random.Generator) -> Codes:
    high, width = 21, 512

    def halves(count: int) -> NDArray[np.float16]:
        return chance.uniform(0.5, 1.5, (high, count)).astype(np.float16)

    codes = chance.integers(0, 1 << form.bits, (high, width), dtype=np.uint8)
    codes[0] = (1 << form.bits) - 1
    scales = width // form.block
    minimum = halves(scales) if form.minimum else None
    if not form.nested:
        return Codes(form, codes, halves(scales), minimum)
    least = 0 if form.minimum else -128
    fine = chance.integers(least, 64 if form.minimum else 128, (high, width // form.scaled)).astype(np.int8)
    return Codes(form, codes, halves(scales), minimum, fine, np.abs(fine) if form.minimum else None)
