"""Attention over cache rows as one operator, with a CPU kernel for the compiler.

PyTorch's fused kernel packs its operands for a matrix library, which costs more than the attention of a short forward
pass itself; the compiler's own loops process the queries one by one. This kernel processes the queries of all heads
that share keys together, up to eight at once: scores over transposed blocks of keys, softmax, then values in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["attention", "own_attention_kernel"]


@torch.library.custom_op("sprinter::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention, ``[batch, n, heads, d_v]``, computed in float32.

    Args:
        query: ``[batch, heads, n, d]``.
        key, value: ``[batch, kv_heads, k, d]`` and ``[..., d_v]``, ``heads`` a multiple of ``kv_heads``.
        mask: bool ``[batch, n, k]``, True for keys that the query sees; at least one per query.
        scale: factor of the scores.
    """
    batch, heads, n, d = query.shape
    rows = query.view(batch, key.shape[1], heads // key.shape[1], n, d).float() * scale
    scores = (rows @ key[:, :, None].float().mT).masked_fill(~mask[:, None, None], -torch.inf)
    out = torch.softmax(scores, -1) @ value[:, :, None].float()
    return out.flatten(1, 2).to(query.dtype).transpose(1, 2).contiguous()


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, n, _ = query.shape
    return query.new_empty(batch, n, heads, value.shape[-1])


_KERNEL = r"""
{{template.header().getvalue()}}
#include <limits>
#include <memory>
namespace {
using T = {{kernel.dtype(query)}};
using Vec = at::vec::Vectorized<float>;
#if defined(CPU_CAPABILITY_AVX512)
using Plain = __m512;
#elif defined(CPU_CAPABILITY_AVX2)
using Plain = __m256;
#else
using Plain = Vec;
#endif
constexpr int WIDE = Vec::size(), ROWS = 8, KEYS = 128;
constexpr int D = {{d}}, DV = {{d_v}}, COLS = (DV + WIDE - 1) / WIDE;

inline Vec load(const T* from, int count) {
{%- if kernel.dtype(query) == "float" %}
    return count == WIDE ? Vec::loadu(from) : Vec::loadu(from, count);
{%- else %}
    return at::vec::convert<float>(at::vec::Vectorized<T>::loadu(from, count));
{%- endif %}
}

inline void store(Vec value, T* to, int count) {
{%- if kernel.dtype(query) == "float" %}
    value.store(to, count);
{%- else %}
    at::vec::convert<T>(value).store(to, count);
{%- endif %}
}

// Scores of M queries [M, D] over WIDE keys that lie on their side, [D, WIDE].
template <int M>
inline void score(const float* q, const float* keys, float* scores, int64_t ld) {
    constexpr int SUMS = M < 4 && D % 4 == 0 ? 4 : 1;  // sums that do not wait for each other
    Plain c[M][SUMS];
    #pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
        #pragma GCC unroll 16
        for (int s = 0; s < SUMS; ++s) c[m][s] = Vec(0.0f);
    for (int i = 0; i < D; i += SUMS)
        #pragma GCC unroll 16
        for (int s = 0; s < SUMS; ++s) {
            const Vec key = Vec::loadu(keys + (i + s) * WIDE);
            #pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
                c[m][s] = at::vec::fmadd(Vec(q[m * D + i + s]), key, Vec(c[m][s]));
        }
    #pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        Vec sum(c[m][0]);
        #pragma GCC unroll 16
        for (int s = 1; s < SUMS; ++s) sum = sum + Vec(c[m][s]);
        sum.store(scores + m * ld);
    }
}

// out [M, COLS * WIDE] += weights of M queries times values of some keys, N vectors of each.
template <int M, int N>
inline void blend(
    const float* weights, int64_t ld, const T* values, int64_t stride, int64_t keys, float* out, int width
) {
    Plain c[M][N];
    #pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
        #pragma GCC unroll 16
        for (int j = 0; j < N; ++j) c[m][j] = Vec::loadu(out + m * COLS * WIDE + j * WIDE);
    for (int64_t k = 0; k < keys; ++k) {
        #pragma GCC unroll 16
        for (int j = 0; j < N; ++j) {
            Plain value = load(values + k * stride + j * WIDE, std::min(WIDE, width - j * WIDE));
            #pragma GCC unroll 16
            for (int m = 0; m < M; ++m)
                c[m][j] = at::vec::fmadd(Vec(weights[m * ld + k]), Vec(value), Vec(c[m][j]));
        }
    }
    #pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
        #pragma GCC unroll 16
        for (int j = 0; j < N; ++j) Vec(c[m][j]).store(out + m * COLS * WIDE + j * WIDE);
}

template <int M>
inline void blend_all(const float* weights, int64_t ld, const T* values, int64_t stride, int64_t keys, float* out) {
    constexpr int REST = COLS % 4;
    for (int col = 0; col < COLS - REST; col += 4)
        blend<M, 4>(weights, ld, values + col * WIDE, stride, keys, out + col * WIDE, DV - col * WIDE);
    if constexpr (REST > 0) {
        constexpr int DONE = (COLS - REST) * WIDE;
        blend<M, REST>(weights, ld, values + DONE, stride, keys, out + DONE, DV - DONE);
    }
}

// Scores [ld] of one query become weights; what their sum is to be divided by is returned.
inline float soften(float* scores, const bool* seen, int64_t keys, int64_t ld) {
    constexpr float LOWEST = std::numeric_limits<float>::lowest();
    Vec top(LOWEST), sum(0.0f);
    for (int64_t k = 0; k < ld; k += WIDE) {
        const auto visible = at::vec::VecMask<float, 1>::from(seen + k, std::min<int64_t>(WIDE, keys - k));
        const Vec score = Vec::blendv(Vec(LOWEST), Vec::loadu(scores + k), visible.template cast<float, 1>());
        score.store(scores + k);
        top = at::vec::maximum(top, score);
    }
    const float most = at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return at::vec::maximum(x, y); }, top);
    const Vec highest(most);
    for (int64_t k = 0; k < ld; k += WIDE) {
        const Vec weight = (Vec::loadu(scores + k) - highest).exp_u20();
        weight.store(scores + k);
        sum = sum + weight;
    }
    // exp_u20 makes a number of a NaN, and scores that are all -inf look masked: what is no number must stay none.
    const float none = most > LOWEST ? most - most : std::numeric_limits<float>::quiet_NaN();
    return at::vec::vec_reduce_all<float>([](Vec& x, Vec& y) { return x + y; }, sum) + none;
}
}  // namespace

extern "C" {{kernel.def_kernel(inputs={"Q": query, "K": key, "V": value, "S": mask}, outputs={"Y": output})}}
{
    {{kernel.maybe_codegen_profile()}}
    const int64_t batch = {{kernel.size(query, 0)}}, n = {{kernel.size(query, 2)}}, keys = {{kernel.size(key, 2)}};
    const int64_t ld = (keys + WIDE - 1) / WIDE * WIDE, rows = n * {{heads // groups}};
    const int64_t step = {{kernel.stride(key, 2)}}, stride = {{kernel.stride(value, 2)}};
{%- if threads > 1 %}
    #pragma omp parallel for collapse(2) num_threads({{threads}})
{%- endif %}
    for (int64_t b = 0; b < batch; ++b)
    for (int64_t kv = 0; kv < {{groups}}; ++kv) {
        const T* key = &{{kernel.index(key, ["b", "kv", 0, 0])}};
        const T* value = &{{kernel.index(value, ["b", "kv", 0, 0])}};
        const std::unique_ptr<float[]> scores(new float[std::min<int64_t>(rows, ROWS) * ld]);
        alignas(64) float q[ROWS * D], side[D * WIDE], out[ROWS * COLS * WIDE], sums[ROWS];
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t m = std::min<int64_t>(rows - row, ROWS);
            for (int64_t r = 0; r < m; ++r) {
                const int64_t head = kv * {{heads // groups}} + (row + r) / n, token = (row + r) % n;
                const T* from = &{{kernel.index(query, ["b", "head", "token", 0])}};
                for (int i = 0; i < D; i += WIDE) {
                    const int count = std::min(WIDE, D - i);
                    (load(from + i, count) * Vec({{scale}}f)).store(q + r * D + i, count);
                }
            }
            for (int64_t k = 0; k < ld; k += WIDE) {
                const int count = std::min<int64_t>(WIDE, keys - k);
{%- if kernel.dtype(query) == "float" %}
                at::vec::transpose_mxn<float>(key + k * step, step, side, WIDE, count, D);
{%- else %}
                alignas(64) float straight[WIDE * D];
                for (int r = 0; r < count; ++r)
                    for (int i = 0; i < D; i += WIDE)
                        load(key + (k + r) * step + i, std::min(WIDE, D - i))
                            .store(straight + r * D + i, std::min(WIDE, D - i));
                at::vec::transpose_mxn<float>(straight, D, side, WIDE, count, D);
{%- endif %}
                switch (m) {
{%- for m in range(1, 9) %}
                case {{m}}: score<{{m}}>(q, side, scores.get() + k, ld); break;
{%- endfor %}
                }
            }
            for (int64_t r = 0; r < m; ++r) {
                const int64_t token = (row + r) % n;
                sums[r] = soften(scores.get() + r * ld, &{{kernel.index(mask, ["b", "token", 0])}}, keys, ld);
            }
            std::fill(out, out + m * COLS * WIDE, 0.0f);
            for (int64_t k = 0; k < keys; k += KEYS) {
                const int64_t count = std::min<int64_t>(KEYS, keys - k);
                for (int64_t r = 0; r < m; r += 4) {
                    const float* weights = scores.get() + r * ld + k;
                    float* to = out + r * COLS * WIDE;
                    switch (std::min<int64_t>(4, m - r)) {
{%- for m in range(1, 5) %}
                    case {{m}}: blend_all<{{m}}>(weights, ld, value + k * stride, stride, count, to); break;
{%- endfor %}
                    }
                }
            }
            for (int64_t r = 0; r < m; ++r) {
                const int64_t head = kv * {{heads // groups}} + (row + r) / n, token = (row + r) % n;
                T* to = &{{kernel.index(output, ["b", "token", "head", 0])}};
                for (int i = 0; i < DV; i += WIDE)
                    store(Vec::loadu(out + r * COLS * WIDE + i) / Vec(sums[r]), to + i, std::min(WIDE, DV - i));
            }
        }
    }
}
"""


@cache
def _template() -> Any:
    from torch._inductor.codegen.cpp_template import CppTemplate

    class Attention(CppTemplate):
        def __init__(self, nodes: list[Any], layout: Any, threads: int, scale: float) -> None:
            super().__init__("attention", nodes, layout, threads)
            self._scale = scale

        def render(self, **kwargs: Any) -> str:
            assert not kwargs.get("epilogue_nodes"), "the compiler must not fuse operations into this one"
            query, key, value, mask = self.input_nodes
            return str(
                self._template_from_string(_KERNEL).render(
                    template=self, kernel=kwargs["kernel"], query=query, key=key, value=value,
                    mask=mask, output=kwargs.get("template_buffer_node") or self.output_node,
                    scale=repr(self._scale), threads=self.num_threads,
                    heads=int(query.get_size()[1]), groups=int(key.get_size()[1]),
                    d=int(query.get_size()[3]), d_v=int(value.get_size()[3]),
                )
            )  # fmt: skip

    return Attention


def _lower(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    from torch._inductor.ir import FixedLayout

    assert query.get_dtype() != torch.float64, (
        "choose.capture_kind refuses float64 with a message for the user"
    )
    nodes = [_straight(node) for node in (query, key, value, mask)]
    batch, heads, n, _ = query.get_size()
    layout = FixedLayout(query.get_device(), query.get_dtype(), [batch, n, heads, value.get_size()[-1]])
    made = _template()(nodes, layout, torch.get_num_threads(), scale).generate().output_node()
    made.data.data.allow_epilogue_fusion = False
    return made


def _straight(node: Any) -> Any:
    """The input realised in memory with its last axis contiguous."""
    from torch._inductor.ir import ExternKernel

    node = ExternKernel.realize_input(node)
    node.freeze_layout()
    return node if node.get_stride()[-1] == 1 else ExternKernel.require_contiguous(node)


@contextmanager
def own_attention_kernel() -> Iterator[None]:
    """Context in which the compiler has our kernel for ``attention``."""
    import torch._inductor.compile_fx
    from torch._inductor.lowering import lowerings

    op = torch.ops.sprinter.attention.default
    lowerings[op] = _lower
    try:
        yield
    finally:
        del lowerings[op]
