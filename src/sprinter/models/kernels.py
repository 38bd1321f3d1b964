"""A mend of the compiler's product kernel, while code is compiled.

Inductor's product for float32 vectors (torch 2.6 to 2.13) keeps its sums in an array of wrapper objects, which g++ does
not take apart: every sum is stored to memory at every step of the inner loop, and products of several rows run at less
than half their speed. An array of plain vectors has no such stores. Where the template reads otherwise than expected,
nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["plain_sums"]

_CHANGES = (
    (
        "at::vec::VectorizedN<{{compute_t}}, ROWS*COLS> vc;",
        "std::conditional_t<VLEN == 16, __m512, __m256> vc[ROWS*COLS];",
    ),
    ("vc[idx] = at::vec::fmadd(va, vb[col], vc[idx]);", "vc[idx] = at::vec::fmadd(va, vb[col], Vectorized(vc[idx]));"),
    ("vc[i].store(", "Vectorized(vc[i]).store("),
)  # fmt: skip


@contextmanager
def plain_sums() -> Iterator[None]:
    """While this lasts, products are compiled with sums in plain vectors (x86 with AVX2 or AVX-512 alone)."""
    import torch._inductor.compile_fx  # noqa: F401  # first: its parts import each other in a circle
    from torch._inductor.codegen.cpp_micro_gemm import CppMicroGemmFP32Vec
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    before = CppMicroGemmFP32Vec.TEMPLATE_KERNEL
    known = str(pick_vec_isa()).startswith("avx") and all(old in before for old, _ in _CHANGES)
    after = before
    for old, new in _CHANGES if known else ():
        after = after.replace(old, new)
    CppMicroGemmFP32Vec.TEMPLATE_KERNEL = after
    try:
        yield
    finally:
        CppMicroGemmFP32Vec.TEMPLATE_KERNEL = before
