"""Sprinter's kernels for CPUs, built for several instruction sets, of which one is chosen here."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import torch

__all__ = ["ASKED", "LAYOUT", "instruction_sets", "kernel_file"]

ASKED = "SPRINTER_KERNELS"
"""Environment variable: the instruction set to use, of those of the processor; the widest if it is not set."""
LAYOUT = 1
"""Version of the order in which packed matrices hold their weights; another one makes kept matrices worthless."""
_SETS = ("avx512", "avx2", "neon", "plain")  # the wider first
_FOLDER = Path(__file__).parent


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets that the kernels are built for and this processor has, the widest first."""
    _find_threads()
    has = ctypes.CDLL(str(_FOLDER / "kernels_plain.so")).sprinter_has
    built = [name for name in _SETS if (_FOLDER / f"kernels_{name}.so").exists()]
    return tuple(name for name in built if has(name.encode()))


def kernel_file() -> Path:
    """The library for this processor.

    Raises:
        ValueError: ``SPRINTER_KERNELS`` names an instruction set that there is not.
    """
    known = instruction_sets()
    name = os.environ.get(ASKED) or known[0]
    if name not in known:
        raise ValueError(f"{ASKED}={name!r} is none of this processor's: use {', '.join(known)}")
    return _FOLDER / f"kernels_{name}.so"


def _find_threads() -> None:
    """Make OpenMP's functions visible, those of torch if it brings any."""
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
