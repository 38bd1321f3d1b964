// Sixteen float32 numbers at a time, in vectors that the processor has: of wider ones compilers make slow code.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int WIDE = 16;
#if defined(__AVX512F__)
constexpr int PART = 16;
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif

template <class Part>
struct Wide {
    Part part[WIDE / PART];
};

typedef float Four __attribute__((vector_size(16)));
typedef float FloatPart __attribute__((vector_size(4 * PART)));
typedef int32_t IntPart __attribute__((vector_size(4 * PART)));
using Floats = Wide<FloatPart>;
using Ints = Wide<IntPart>;

// call(i) of each part.
template <class Call>
inline auto each(Call call) {
    using Made = Wide<decltype(call(0))>;
    if constexpr (WIDE / PART == 1) return Made{{call(0)}};
    else if constexpr (WIDE / PART == 2) return Made{{call(0), call(1)}};
    else return Made{{call(0), call(1), call(2), call(3)}};
}

inline Floats operator+(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.part[i] + b.part[i]; });
}
inline Floats operator-(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.part[i] - b.part[i]; });
}
inline Floats operator*(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.part[i] * b.part[i]; });
}
inline Floats operator/(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.part[i] / b.part[i]; });
}
inline Floats operator+(const Floats& a, float b) { return each([&](int i) { return a.part[i] + b; }); }
inline Floats operator-(const Floats& a, float b) { return each([&](int i) { return a.part[i] - b; }); }
inline Floats operator*(const Floats& a, float b) { return each([&](int i) { return a.part[i] * b; }); }
inline Floats& operator+=(Floats& a, const Floats& b) { return a = a + b; }

inline Floats all(float x) { return Floats{} + x; }

// Part by part: as one, it would go through memory.
inline Floats load(const float* from) {
    return each([&](int i) {
        FloatPart made;
        std::memcpy(&made, from + i * PART, sizeof made);
        return made;
    });
}

inline void store(float* at, const Floats& x) {
#pragma GCC unroll 4
    for (int i = 0; i < WIDE / PART; ++i) std::memcpy(at + i * PART, &x.part[i], sizeof x.part[i]);
}

inline float total(Four x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// In one order on every processor.
inline float total(const Floats& x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256 sum = x.part[0] + x.part[1];
    return total(Four(_mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1))));
#else
    Four fours[4];
    std::memcpy(fours, &x, sizeof fours);
    return total((fours[0] + fours[2]) + (fours[1] + fours[3]));
#endif
}

#if defined(__AVX512F__)

// The totals of four vectors of 16, each of halves, quarters, pairs and single numbers: the order of _mm512_reduce_add_ps.
inline Four totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    const auto halved = [](__m512 x, __m512 y) {  // quarters 0 + 2 and 1 + 3 of x, then of y
        return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    };
    const __m512 ab = halved(a, b), cd = halved(c, d);
    const __m512 four = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    const __m512 two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
    const __m512 one = _mm512_add_ps(two, _mm512_permute_ps(two, 0xb1));
    const __m512i first = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    return Four(_mm512_castps512_ps128(_mm512_permutexvar_ps(first, one)));
}

#endif
#if defined(__AVX2__)

// The same of vectors of 8.
inline Four totals(__m256 a, __m256 b, __m256 c, __m256 d) {
    const auto summed = [](__m256 x, __m256 y) {  // of x at 0, of y at 4
        const __m256 four = _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
        const __m256 two = _mm256_add_ps(four, _mm256_permute_ps(four, 0x4e));
        return _mm256_add_ps(two, _mm256_permute_ps(two, 0xb1));
    };
    const __m256 each = _mm256_unpacklo_ps(summed(a, b), summed(c, d));
    return Four(_mm_unpacklo_ps(_mm256_castps256_ps128(each), _mm256_extractf128_ps(each, 1)));
}

#endif

// The totals of four, each in the same order.
inline Four totals(const Floats& a, const Floats& b, const Floats& c, const Floats& d) {
#if defined(__AVX512F__)
    return totals(__m512(a.part[0]), __m512(b.part[0]), __m512(c.part[0]), __m512(d.part[0]));
#elif defined(__AVX2__)
    const auto half = [](const Floats& x) { return __m256(x.part[0] + x.part[1]); };
    return totals(half(a), half(b), half(c), half(d));
#else
    return Four{total(a), total(b), total(c), total(d)};
#endif
}

inline float most_of(const Floats& x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(__m512(x.part[0]));
#else
    FloatPart most = x.part[0];
    for (int i = 1; i < WIDE / PART; ++i) most = most < x.part[i] ? x.part[i] : most;
    float made = most[0];
    for (int i = 1; i < PART; ++i) made = std::max(made, most[i]);
    return made;
#endif
}

inline Floats larger(const Floats& a, const Floats& b) {
    return each([&](int i) { return a.part[i] < b.part[i] ? b.part[i] : a.part[i]; });
}

// `yes` where x < least, else `no`.
inline Floats below(const Floats& x, float least, const Floats& yes, const Floats& no) {
    return each([&](int i) { return x.part[i] < FloatPart{} + least ? yes.part[i] : no.part[i]; });
}

inline Floats absolute(const Floats& x) {
    return each([&](int i) { return FloatPart(IntPart(x.part[i]) & 0x7fffffff); });
}

// The nearest integers, to even ones from the middle, of numbers below 2^22.
inline Floats nearest(const Floats& x) { return (x + 12582912.0f) - 12582912.0f; }

inline Ints integers(const Floats& x) {
    return each([&](int i) { return __builtin_convertvector(x.part[i], IntPart); });
}

// Integers of 8 bits -> bytes; their sum.
inline int32_t store_bytes(int8_t* at, const Ints& x) {
#if defined(__AVX512F__)
    const __m128i bytes = _mm512_cvtepi32_epi8(__m512i(x.part[0]));
    std::memcpy(at, &bytes, sizeof bytes);
    return _mm512_reduce_add_epi32(__m512i(x.part[0]));
#elif defined(__AVX2__)
    const __m256i a = __m256i(x.part[0]), b = __m256i(x.part[1]);
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    std::memcpy(at, &bytes, sizeof bytes);
    const __m256i sum = _mm256_add_epi32(a, b);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#else
    typedef int8_t BytePart __attribute__((vector_size(PART)));
    int32_t sum = 0;
    for (int i = 0; i < WIDE; ++i) sum += x.part[i / PART][i % PART];
    const auto bytes = each([&](int i) { return __builtin_convertvector(x.part[i], BytePart); });
    std::memcpy(at, &bytes, WIDE);
    return sum;
#endif
}

// e^x for x <= 0, to about 1e-7 of its value; 0 below -87.
inline Floats exponential(const Floats& x) {
    const float least = -87.0f;
    const Floats kept = below(x, least, all(least), x), rounded = nearest(kept * 1.44269504f);
    const Floats r = (kept - rounded * 0.693145752f) - rounded * 1.42860677e-6f;
    Floats y = all(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints whole = integers(rounded);
    const Floats power = each([&](int i) { return FloatPart((whole.part[i] + 127) << 23); });
    return below(x, least, Floats{}, y * power);
}

}  // namespace
