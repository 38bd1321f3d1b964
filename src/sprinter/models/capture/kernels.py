"""A matrix product kernel for the compiler (x86 with AVX2 or AVX-512).

Inductor's vector kernel accumulates into an array that g++ does not keep in registers: sums are stored to memory at
every step of the inner loop. It processes blocks of two or three vectors, too few independent sums to keep the units
busy with one or two tokens, and converts bfloat16 to float32 first. This kernel uses plain vectors in unrolled loops,
in blocks of four, and multiplies bfloat16 in pairs if the CPU has instructions for it. With AMX the compiler's own
kernels are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

__all__ = ["own_products"]

_KERNEL = r"""
template <int ROWS, bool accum>
inline void {{kernel_name}}_rows(
    const {{input_t}}* {{restrict_keyword}} A, const {{input2_t}}* {{restrict_keyword}} B,
    float* {{restrict_keyword}} C, int64_t K, int64_t lda, int64_t ldb, int64_t ldc
) {
    using Vec = at::vec::Vectorized<float>;
    using Plain = std::conditional_t<Vec::size() == 16, __m512, __m256>;
    constexpr int WIDE = Vec::size(), COLS = {{block_n}} / WIDE;
    Plain c[ROWS][COLS];
    #pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
        #pragma GCC unroll 16
        for (int col = 0; col < COLS; ++col)
            c[row][col] = accum ? Vec::loadu(C + row * ldc + col * WIDE) : Vec(0.0f);
    for (int64_t k = 0; k < K; k += {{block_k}}) {
        Plain b[COLS];
        #pragma GCC unroll 16
        for (int col = 0; col < COLS; ++col) {
{%- if pairs %}
            b[col] = _mm512_loadu_ps(reinterpret_cast<const float*>(B + k * ldb) + col * WIDE);
{%- else %}
            b[col] = Vec::loadu(B + k * ldb + col * WIDE);
{%- endif %}
            asm("" : "+v"(b[col]));  // else it is read from memory once a row, and twice where it crosses cache lines
        }
        #pragma GCC unroll 16
        for (int row = 0; row < ROWS; ++row) {
{%- if pairs %}
            float pair;
            std::memcpy(&pair, A + row * lda + k, sizeof(pair));
            const Plain a = _mm512_set1_ps(pair);
{%- else %}
            const Vec a(A[row * lda + k]);
{%- endif %}
            #pragma GCC unroll 16
            for (int col = 0; col < COLS; ++col)
{%- if pairs %}
                c[row][col] = _mm512_dpbf16_ps(c[row][col], (__m512bh)a, (__m512bh)b[col]);
{%- else %}
                c[row][col] = at::vec::fmadd(a, Vec(b[col]), Vec(c[row][col]));
{%- endif %}
        }
    }
    #pragma GCC unroll 16
    for (int row = 0; row < ROWS; ++row)
        #pragma GCC unroll 16
        for (int col = 0; col < COLS; ++col)
            Vec(c[row][col]).store(C + row * ldc + col * WIDE);
}

{{declare_kernel}} {
    for (int64_t m = 0; m < M; m += {{block_m}}) {
        for (int64_t n = 0; n < N; n += {{block_n}}) {
            switch (std::min<int64_t>(M - m, {{block_m}})) {
{%- for rows in range(1, block_m + 1) %}
            case {{rows}}:
                {{kernel_name}}_rows<{{rows}}, accum>(A + m * lda, B + n, C + m * ldc + n, K, lda, ldb, ldc);
                break;
{%- endfor %}
            }
        }
    }
}
"""


@cache
def _own_configs() -> tuple[type, list[Any]]:
    """The kernel's class and the configurations in which it is used."""
    import torch
    import torch._inductor.compile_fx  # first, because of its circular imports
    from torch._inductor.codegen import cpp_micro_gemm as own
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.cpu_vec_isa import VecAVX2, VecAVX512

    class Product(own.CppMicroGemm):
        def codegen_define(self, kernel: Any) -> str:
            if self.pack_vnni_B_locally:  # a product of two activations
                dtypes = self.input_dtype, self.input2_dtype, self.output_dtype, self.compute_dtype
                other: Any = own.CppMicroGemmFP32Vec(self.name, *dtypes, self.register_blocking, self.alpha)
                return str(other.codegen_define(kernel))
            this: Any = self
            m, n, k = self.register_blocking
            options = this.get_common_options()
            options |= {"declare_kernel": this.get_kernel_declaration(), "pairs": k == 2}
            options |= {"block_m": m, "block_n": n, "block_k": k}
            return str(KernelTemplate._template_from_string(_KERNEL).render(options))

        def get_b_layout(self) -> Any:
            return own.LayoutType.VNNI2 if self.register_blocking.block_k == 2 else own.LayoutType.NORMAL

    def plain(config: Any, m: Any, n: Any, k: Any, alpha: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(alpha == 1)

    def pairs(config: Any, m: Any, n: Any, k: Any, alpha: Any, *args: Any, **kwargs: Any) -> bool:
        return bool(alpha == 1 and k % 2 == 0 and kwargs["vec_isa"].is_avx512_bf16_supported())

    make: Any = own.generate_gemm_config
    blocks = [(6, 64, 2), (12, 32, 2), (16, 16, 2)]
    floats = make(VecAVX512, [(12, 32, 1), (8, 48, 1), (16, 16, 1)], extra_check=plain)
    narrow = make(VecAVX2, [(4, 24, 1), (6, 16, 1), (8, 8, 1)], extra_check=plain)
    halves = make(VecAVX512, blocks, torch.bfloat16, output_dtype=torch.float, extra_check=pairs)
    return Product, [*floats, *narrow, *halves]


@contextmanager
def own_products() -> Iterator[None]:
    """Context in which the compiler prefers our kernel, and parses each template once instead of once a product."""
    product, configs = _own_configs()
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.codegen.cpp_micro_gemm import micro_gemm_configs

    before, parse = dict(micro_gemm_configs), KernelTemplate._template_from_string
    micro_gemm_configs.clear()
    micro_gemm_configs.update({product: configs, **before})
    KernelTemplate._template_from_string = staticmethod(cache(parse))  # type: ignore[method-assign]
    try:
        yield
    finally:
        KernelTemplate._template_from_string = staticmethod(parse)  # type: ignore[method-assign]
        micro_gemm_configs.clear()
        micro_gemm_configs.update(before)
