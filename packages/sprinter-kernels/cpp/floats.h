// Products of float32 activations with weights in float32 or bfloat16, [high, width] as PyTorch has them.
//
// A sum runs over the columns in one order, whatever the number of tokens, so that the result of a token does not
// depend on the others.

#pragma once

#include "products.h"

namespace {

constexpr int64_t FLOAT32 = 8, BFLOAT16 = 9;  // numbers of kinds, as library.py has them, after those of with_format

// Tokens that are multiplied together, and their sums with several rows of weights, which the registers hold. Measured
// with 32 registers: a pass over six at a time takes longer than one over three twice.
constexpr int TOKENS = Vec::LANES == 16 ? 5 : 6, SUMS = Vec::LANES == 16 ? 24 : 12;

// made [N, CHANNELS]
template <class T, int R, int N>
void multiply_floats(const T* weights, int64_t width, const float* x, float* made) {
    // Measured: the next rows, but of float32 they would push this pass's out of the first cache.
    const int64_t ahead = sizeof(T) == 2 ? R * width : 128;
    Vec::Float sums[R][N];
#pragma GCC unroll 24
    for (int i = 0; i < R * N; ++i) sums[i / N][i % N] = Vec::zero();
    // Where sums and not memory take the time, each line of the cache is fetched once.
    constexpr bool ONCE = N >= 4 && Vec::LANES == 8;
    constexpr int64_t LINE = ONCE ? 64 / sizeof(T) : Vec::LANES;
    for (int64_t line = 0; line < width; line += LINE) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) __builtin_prefetch(weights + r * width + line + ahead);
        for (int64_t k = line, end = ONCE ? std::min(line + LINE, width) : line + LINE; k < end; k += Vec::LANES) {
            Vec::Float part[R];
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) part[r] = Vec::numbers(weights + r * width + k);
#pragma GCC unroll 6
            for (int t = 0; t < N; ++t) {
                const auto own = Vec::here(Vec::numbers(x + t * width + k));  // loaded once, not for each row
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) sums[r][t] = Vec::fma(part[r], own, sums[r][t]);
            }
        }
    }
    float apart[R * N];
    const auto sum = [&](int i) { return sums[i % R][i / R]; };
    constexpr int FOURS = R * N / 4 * 4;
#pragma GCC unroll 24
    for (int i = 0; i < FOURS; i += 4) Vec::totals(sum(i), sum(i + 1), sum(i + 2), sum(i + 3), apart + i);
#pragma GCC unroll 4
    for (int i = FOURS; i < R * N; ++i) apart[i] = Vec::total(sum(i));
#pragma GCC unroll 6
    for (int t = 0; t < N; ++t)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) made[t * CHANNELS + r] = apart[t * R + r];
}

// Products of up to N tokens with some rows.
template <class T, int N = TOKENS>
void multiply_floats(int64_t tokens, const T* weights, int64_t rows, int64_t width, const float* x, float* made) {
    if constexpr (N > 1) {
        if (tokens < N) return multiply_floats<T, N - 1>(tokens, weights, rows, width, x, made);
    }
    constexpr int R = SUMS >= 8 * N ? 8 : SUMS >= 4 * N ? 4 : SUMS >= 3 * N ? 3 : 2;
    int64_t r = 0;
    if constexpr (R == 3) {  // the last four of a block two by two
        for (; r + 3 <= rows && rows - r != 4; r += 3)
            multiply_floats<T, R, N>(weights + r * width, width, x, made + r);
        for (; r + 2 <= rows; r += 2) multiply_floats<T, 2, N>(weights + r * width, width, x, made + r);
    }
    for (; r + R <= rows; r += R) multiply_floats<T, R, N>(weights + r * width, width, x, made + r);
    for (; r < rows; ++r) multiply_floats<T, 1, N>(weights + r * width, width, x, made + r);
}

// Inside a parallel region; as `product`. The width is a multiple of Vec::LANES.
template <class T>
void product_floats(
    const T* weights, const Runs& runs, int64_t high, int64_t width, const float* x, int64_t tokens, const float* bias,
    const float* more, float* y, Turn turn
) {
    constexpr int64_t CACHED = 1 << 18;  // activations that stay in the cache while a block of weights is read
    const int64_t most = std::max<int64_t>(CACHED / width / TOKENS, 2) * TOKENS;
    const int64_t blocks = (high + CHANNELS - 1) / CHANNELS;
    for (int64_t top = 0; top < tokens; top += most) {
        const int64_t many = std::min(tokens - top, most), tiles = (many + TOKENS - 1) / TOKENS;
#pragma omp for nowait
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * CHANNELS, place = runs.at(first);
            const int64_t rows = std::min<int64_t>(CHANNELS, high - first);
            for (int64_t tile = 0; tile < tiles; ++tile) {  // tiles of about one size
                const int64_t from = top + many * tile / tiles, to = top + many * (tile + 1) / tiles;
                float made[TOKENS * CHANNELS];
                multiply_floats<T>(to - from, weights + place * width, rows, width, x + from * width, made);
                for (int64_t t = from; t < to; ++t) {
                    const float* own = more ? more + t * high + first : nullptr;  // which may be of y
                    const float* sums = made + (t - from) * CHANNELS;
                    finish(sums, bias ? bias + place : nullptr, own, y + t * high + first, rows);
                }
            }
        }
    }
    if (turn.last) {
#pragma omp barrier
    }
}

}  // namespace
