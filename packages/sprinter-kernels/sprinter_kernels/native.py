"""The C++ modules, built for several instruction sets, of which one is chosen here; matrices as they read them."""

from __future__ import annotations

import ctypes
import mmap as mmap_module
import os
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sprinter_kernels.layout import FORMATS, Blocks, Format

__all__ = [
    "ASKED", "FLOATS", "LAYOUT", "NUMBER", "floats", "instruction_set", "instruction_sets", "native", "pack",
    "packed_size", "room",
]  # fmt: skip

ASKED = "SPRINTER_KERNELS"
"""Environment variable: the instruction set to use, of those of the processor; the widest if it is not set."""
LAYOUT = 1
"""Version of the order in which packed matrices hold their weights; another one makes kept matrices worthless."""
NUMBER = {name: i for i, name in enumerate(FORMATS)}
"""Kind of weights -> its number in ``with_format``."""
FLOATS = {torch.float32: len(FORMATS), torch.bfloat16: len(FORMATS) + 1}
"""Kinds of weights that are read as they are -> their numbers in floats.h."""
_SETS = ("avx512", "avx2", "neon", "plain")  # the wider first


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the kernels are built for and this processor has, the widest first."""
    _find_threads()
    has = import_module("sprinter_kernels.plain").has
    return tuple(name for name in _SETS if find_spec(f"sprinter_kernels.{name}") is not None and has(name))


def instruction_set() -> str:
    """The one that is used.

    Raises:
        ValueError: ``SPRINTER_KERNELS`` names one that there is not.
    """
    known = instruction_sets()
    name = os.environ.get(ASKED) or known[0]
    if name not in known:
        raise ValueError(f"{ASKED}={name!r} is none of this processor's: use {', '.join(known)}")
    return name


@cache
def native() -> Any:
    """The module of that instruction set, for as long as the process lives.

    Raises:
        ValueError: as ``instruction_set``.
    """
    return import_module(f"sprinter_kernels.{instruction_set()}")


def _find_threads() -> None:
    """Make OpenMP's functions visible to the modules, those of torch if it brings any."""
    suffix = "dylib" if sys.platform == "darwin" else "so.1"
    folder = Path(torch.__file__).parent / "lib"
    own = [
        *folder.glob(f"libgomp*.{suffix}*"),
        *folder.glob(f"libomp*.{suffix}*"),
        *folder.glob("libiomp5.*"),
    ]
    for name in (*map(str, own), f"libgomp.{suffix}", f"libomp.{suffix}"):
        try:
            ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


def packed_size(form: Format, high: int, width: int) -> int:
    """Bytes of a packed matrix."""
    return int(native().bytes(NUMBER[form.name], high, width))


def pack(
    blocks: Blocks,
    form: Format,
    order: NDArray[np.int64] | None = None,
    made: Tensor | None = None,
    threads: int | None = None,
) -> Tensor:
    """Rows of blocks in the order in which the kernels read them, uint8.

    Args:
        order: the rows of the matrix, as numbers of those of ``blocks``; None: all, as they are.
        made: memory of ``packed_size`` to write to. threads: None: PyTorch's number.

    Raises:
        ValueError: rows that are not whole blocks.
    """
    if blocks.shape[1] % form.bytes:
        raise ValueError(f"{form.name} weights come in whole blocks of {form.bytes} bytes")
    rows, numbers = np.ascontiguousarray(blocks), np.arange(len(blocks)) if order is None else order
    high, width = len(numbers), rows.shape[1] // form.bytes * form.block
    made = room(packed_size(form, high, width)) if made is None else made
    native().pack(
        NUMBER[form.name], rows.ctypes.data, np.ascontiguousarray(numbers).ctypes.data, high, width, made.data_ptr(),
        threads or torch.get_num_threads(),
    )  # fmt: skip
    return made


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
