// Products of float32 activations with weights of 4, 5, 6 or 8 bits in groups, as GGUF files store them.
//
// y[t, n] = sum over k of x[t, k] * w[n, k],  w = scale * (code - offset)  or  scale * code - minimum.
//
// Activations are rounded to 8 bits in groups of 32. Sums within a group are exact integers; groups are added in float32
// in their order, whatever the number of tokens, so that the result of a token does not depend on the others.
//
// Layout of packed weights: blocks of 16 output channels, one after the other; in each, first all scales, then all codes,
// both padded to 64 bytes. A group of 32 codes (k) of 16 channels (n) is 8 rows of 64 bytes, row j with codes 4j to 4j + 3
// of channel n at bytes 4n to 4n + 3. With fewer than 8 bits, the low four bits of rows j and j + 4 share one row of bytes,
// and each further bit is a plane of 8 x 64 bits after them.

#pragma once

#include "vectors.h"

#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int CHANNELS = 16, GROUP = 32, SUPER = 256;
constexpr int64_t AHEAD = 8192;  // bytes between what is used and what is fetched

// A sum that starts at SHIFT has the bits of SHIFTED + sum, if it is below 2^22. Times a scale of at most 22 bits,
// SHIFTED is exact: one fused operation makes of the sum what converting and multiplying would.
constexpr int32_t SHIFT = 0x4b400000;
constexpr float SHIFTED = 12582912.0f;

template <int BITS_, int SCALED_, bool NESTED_, bool MINIMUM_>
struct Format {
    static constexpr int BITS = BITS_;           // of a code
    static constexpr int SCALED = SCALED_;       // codes that share a scale: 32 or 16
    static constexpr bool NESTED = NESTED_;      // scales are 8-bit integers times one of 16 bits for 256 codes
    static constexpr bool MINIMUM = MINIMUM_;    // there is a minimum beside the scale
    static constexpr int PARTS = GROUP / SCALED;
    static constexpr int OFFSET = MINIMUM ? 0 : 1 << (BITS - 1);
    static constexpr int64_t CODES = 64 * BITS;  // bytes of a group
    // Bytes of the 16-bit scales, and minima, of 16 channels; of the 8-bit ones of a group; of all of 256 codes.
    static constexpr int64_t HALVES = MINIMUM ? 64 : 32, FINE = (PARTS + MINIMUM) * CHANNELS;
    static constexpr int64_t NEST = HALVES + SUPER / GROUP * FINE;
    static constexpr int64_t EACH = CODES + (NESTED ? NEST * GROUP / SUPER : HALVES);  // bytes of a group with its scales

    static int64_t groups(int64_t width) { return width / GROUP; }
    static int64_t scales(int64_t width) {
        const int64_t bytes = NESTED ? width / SUPER * NEST : groups(width) * HALVES;
        return (bytes + 63) / 64 * 64;
    }
    // Where the 16-bit and the 8-bit scales of a group begin.
    static int64_t halves_at(int64_t g) { return NESTED ? g / (SUPER / GROUP) * NEST : g * HALVES; }
    static int64_t fine_at(int64_t g) { return halves_at(g) + HALVES + g % (SUPER / GROUP) * FINE; }
    static int64_t block(int64_t width) { return scales(width) + groups(width) * CODES; }
};

struct Bfloat16 {
    uint16_t bits;
};

// --- vectors: 16 channels, or half of them ---------------------------------------------------------------------------
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Vec {
    static constexpr int LANES = 16, MOST = 16;
    using Float = __m512;
    using Int = __m512i;
    static constexpr bool SIGNED = false;  // whether dot_eight takes the offset off the codes
    static constexpr int together(int) { return 1; }

    static Float zero() { return _mm512_setzero_ps(); }
    static Float halves(const uint8_t* at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)at)); }
    static Float bytes(const uint8_t* at) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
    }
    static Float all(float x) { return _mm512_set1_ps(x); }
    static Float mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
    static Float less(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }
    static Float floats(Int x) { return _mm512_cvtepi32_ps(x); }
    static Float times(Int shifted, Float scale, Float less) { return fma(_mm512_castsi512_ps(shifted), scale, less); }
    static Int all(int32_t x) { return _mm512_set1_epi32(x); }
    static Int load(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static Int low(Int x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static Int high(Int x) { return low(_mm512_srli_epi16(x, 4)); }
    static Int with_bit(Int x, const uint8_t* plane, int bit) {
        uint64_t mask;
        std::memcpy(&mask, plane, 8);
        return _mm512_mask_add_epi8(x, mask, x, _mm512_set1_epi8(char(1 << bit)));
    }
    static Int dot(Int sum, Int codes, Int numbers) { return _mm512_dpbusd_epi32(sum, codes, numbers); }
    static Int dot_eight(Int sum, Int codes, Int numbers) { return dot(sum, codes, numbers); }
    static void store(float* at, Float x) { _mm512_storeu_ps(at, x); }
    static Float numbers(const float* at) { return _mm512_loadu_ps(at); }
    static Float numbers(const Bfloat16* at) {
        const Int wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static float total(Float x) { return _mm512_reduce_add_ps(x); }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Vec {
    static constexpr int LANES = 8, MOST = 8;
    using Float = __m256;
    using Int = __m256i;
    static constexpr bool SIGNED = true;  // products of pairs of 8 bits fit into 16 only with a sign

    static Float zero() { return _mm256_setzero_ps(); }
    static Float halves(const uint8_t* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }
    static Float bytes(const uint8_t* at) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)at)));
    }
    static Float all(float x) { return _mm256_set1_ps(x); }
    static Float mul(Float a, Float b) { return _mm256_mul_ps(a, b); }
    static Float fma(Float a, Float b, Float c) { return _mm256_fmadd_ps(a, b, c); }
    static Float less(Float a, Float b, Float c) { return _mm256_fnmadd_ps(a, b, c); }
    static Float floats(Int x) { return _mm256_cvtepi32_ps(x); }
    static Float times(Int shifted, Float scale, Float less) { return fma(_mm256_castsi256_ps(shifted), scale, less); }
    static Int all(int32_t x) { return _mm256_set1_epi32(x); }
    static Int load(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
    static Int low(Int x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static Int high(Int x) { return low(_mm256_srli_epi16(x, 4)); }
    static Int with_bit(Int x, const uint8_t* plane, int bit) {
        uint32_t mask;
        std::memcpy(&mask, plane, 4);
        const Int byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const Int picked = _mm256_shuffle_epi8(_mm256_set1_epi32(int(mask)), byte);
        const Int one = _mm256_set1_epi64x(int64_t(0x8040201008040201));
        const Int set = _mm256_cmpeq_epi8(_mm256_and_si256(picked, one), one);
        return _mm256_or_si256(x, _mm256_and_si256(set, _mm256_set1_epi8(char(1 << bit))));
    }
    // Sums of pairs, in 16 bits, which hold those of 8, 4 or 2 products of codes of 4, 5 or 6 bits.
    static constexpr int together(int bits) { return bits < 7 ? 128 >> bits : 1; }
    static Int pairs(Int codes, Int numbers) { return _mm256_maddubs_epi16(codes, numbers); }
    static Int add_pairs(Int a, Int b) { return _mm256_add_epi16(a, b); }
    static Int add(Int sum, Int pairs) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Int dot_eight(Int sum, Int codes, Int numbers) {
        const Int offset = _mm256_xor_si256(codes, _mm256_set1_epi8(char(0x80)));  // codes - 128
        return add(sum, pairs(_mm256_abs_epi8(offset), _mm256_sign_epi8(numbers, offset)));
    }
    static void store(float* at, Float x) { _mm256_storeu_ps(at, x); }
    static Float numbers(const float* at) { return _mm256_loadu_ps(at); }
    static Float numbers(const Bfloat16* at) {
        const Int wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
    static float total(Float x) {
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
};

#else

float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 1023;
    float value;
    if (exponent == 0) {
        value = std::ldexp(float(fraction), -24);
        return sign ? -value : value;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    std::memcpy(&value, &bits, 4);
    return value;
}

struct Vec {  // any processor
    static constexpr int LANES = 4, MOST = 2;
    typedef float Float __attribute__((vector_size(16)));
    typedef int32_t Int __attribute__((vector_size(16)));
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    static constexpr bool SIGNED = false;
    static constexpr int together(int) { return 1; }

    static Float zero() { return Float{0, 0, 0, 0}; }
    static Float halves(const uint8_t* at) {
        Float made;
        for (int i = 0; i < 4; ++i) {
            uint16_t half;
            std::memcpy(&half, at + 2 * i, 2);
            made[i] = half_to_float(half);
        }
        return made;
    }
    static Float bytes(const uint8_t* at) {
        return Float{float(int8_t(at[0])), float(int8_t(at[1])), float(int8_t(at[2])), float(int8_t(at[3]))};
    }
    static Float all(float x) { return Float{x, x, x, x}; }
    static Float mul(Float a, Float b) { return a * b; }
    static Float fma(Float a, Float b, Float c) { return a * b + c; }
    static Float less(Float a, Float b, Float c) { return c - a * b; }
    static Float floats(Int x) { return __builtin_convertvector(x, Float); }
    static Float times(Int shifted, Float scale, Float) { return floats(shifted - SHIFT) * scale; }
    static Int all(int32_t x) { return Int{x, x, x, x}; }
    static Int load(const uint8_t* at) {
        Int made;
        std::memcpy(&made, at, 16);
        return made;
    }
    static Int low(Int x) { return x & 0x0f0f0f0f; }
    static Int high(Int x) { return (x >> 4) & 0x0f0f0f0f; }
    static Int with_bit(Int x, const uint8_t* plane, int bit) {
        uint16_t mask;
        std::memcpy(&mask, plane, 2);
        Bytes codes = (Bytes)x;
        for (int i = 0; i < 16; ++i) codes[i] |= uint8_t((mask >> i & 1) << bit);
        return (Int)codes;
    }
    static Int dot(Int sum, Int codes, Int numbers) {
        const Bytes code = (Bytes)codes, number = (Bytes)numbers;
        for (int i = 0; i < 4; ++i)
            for (int k = 0; k < 4; ++k) sum[i] += int32_t(code[4 * i + k]) * int8_t(number[4 * i + k]);
        return sum;
    }
    static Int dot_eight(Int sum, Int codes, Int numbers) { return dot(sum, codes, numbers); }
    static void store(float* at, Float x) { std::memcpy(at, &x, 16); }
    static Float numbers(const float* at) {
        Float made;
        std::memcpy(&made, at, sizeof made);
        return made;
    }
    static Float numbers(const Bfloat16* at) {
        const Int wide = {at[0].bits, at[1].bits, at[2].bits, at[3].bits};
        return (Float)(wide << 16);
    }
    static float total(Float x) { return (x[0] + x[2]) + (x[1] + x[3]); }
};

#endif

// --- activations -----------------------------------------------------------------------------------------------------
constexpr int CHUNK = 16;  // rows whose codes of a group lie together

struct Rounded {  // rows of activations in 8 bits: [chunks, groups, CHUNK] of 32 codes, and of scales
    int64_t groups;
    int8_t* codes;
    float *scale, *sum;  // of a group; sum = scale times the sum of its codes
    int32_t* start;      // -offset times the sum of the codes that share a scale; with two of them [.., 2, CHUNK].
                         // SHIFT is added to the first.

    int64_t slot(int64_t row, int64_t g) const { return (row / CHUNK * groups + g) * CHUNK + row % CHUNK; }
    template <class F>
    int64_t first_start(int64_t row, int64_t g) const {
        return (row / CHUNK * groups + g) * CHUNK * F::PARTS + row % CHUNK;
    }
};

// Make room for `count` numbers. It stays for the next call, unless the last one was for a long prompt.
template <class T>
void reserve(std::vector<T>& kept, int64_t count) {
    constexpr size_t MOST = size_t(16) << 20;
    if (kept.size() > MOST && size_t(count) <= MOST) std::vector<T>().swap(kept);
    if (kept.size() < size_t(count)) kept.resize(size_t(count));
}

class Room {  // for rounded activations
  public:
    void reserve_rows(int64_t rows, int64_t width) {
        const int64_t groups = (rows + CHUNK - 1) / CHUNK * CHUNK * (width / GROUP);
        reserve(codes, groups * GROUP);
        reserve(scale, groups);
        reserve(sum, groups);
        reserve(start, groups * 2);
    }
    Rounded of(int64_t width) {
        return {width / GROUP, codes.data(), scale.data(), sum.data(), start.data()};
    }

  private:
    std::vector<int8_t> codes;
    std::vector<float> scale, sum;
    std::vector<int32_t> start;
};

template <class F>
void round_group(const float* x, const Rounded& made, int64_t row, int64_t g) {
    const int64_t at = made.slot(row, g);
    Floats most = {}, poisons = {};  // not a number if one of the activations is none, or infinite
    for (int k = 0; k < GROUP; k += WIDE) {
        most = larger(most, absolute(load(x + k)));
        poisons += load(x + k) * 0.0f;
    }
    const float largest = most_of(most), poison = total(poisons), scale = largest / 127.0f;
    const float times = largest > 1e-30f && poison == 0.0f ? 127.0f / largest : 0.0f;
    int32_t whole = 0;
    for (int part = 0; part < F::PARTS; ++part) {
        int32_t sum = 0;
        for (int k = part * F::SCALED; k < (part + 1) * F::SCALED; k += WIDE) {
            const Ints wide = __builtin_convertvector(nearest(load(x + k) * times), Ints);
            const Bytes codes = __builtin_convertvector(wide, Bytes);
            std::memcpy(made.codes + at * GROUP + k, &codes, sizeof codes);
            sum += total(wide);
        }
        const bool without = F::BITS == 8 && Vec::SIGNED;
        made.start[made.first_start<F>(row, g) + part * CHUNK] = (part ? 0 : SHIFT) - (without ? 0 : F::OFFSET * sum);
        whole += sum;
    }
    made.scale[at] = scale + poison;
    made.sum[at] = scale * float(whole);
}

// --- products --------------------------------------------------------------------------------------------------------
template <class F>
struct Scales {  // of one group of the channels
    typename Vec::Float scale[F::PARTS], minimum;
};

template <class F>
inline Scales<F> scales_of(const uint8_t* scales, int64_t g, int from) {
    Scales<F> made;
    const uint8_t *halves = scales + F::halves_at(g) + 2 * from, *fine = scales + F::fine_at(g) + from;
    const auto scale = Vec::halves(halves);
    for (int part = 0; part < F::PARTS; ++part)
        made.scale[part] = F::NESTED ? Vec::mul(scale, Vec::bytes(fine + part * CHANNELS)) : scale;
    if constexpr (F::MINIMUM) {
        made.minimum = Vec::halves(halves + 2 * CHANNELS);
        if constexpr (F::NESTED) made.minimum = Vec::mul(made.minimum, Vec::bytes(fine + F::PARTS * CHANNELS));
    }
    return made;
}

// Row j of a group's codes for the channels from `from`.
template <class F>
inline typename Vec::Int codes_of(const uint8_t* codes, int j, int from) {
    if constexpr (F::BITS == 8) {
        return Vec::load(codes + 64 * j + 4 * from);
    } else {
        const auto both = Vec::load(codes + 64 * (j % 4) + 4 * from);
        auto made = j < 4 ? Vec::low(both) : Vec::high(both);
        for (int bit = 4; bit < F::BITS; ++bit)
            made = Vec::with_bit(made, codes + 256 + 64 * (bit - 4) + 8 * j + from / 2, bit);
        return made;
    }
}

template <class F, int N, class V = Vec>
void multiply(const uint8_t* scales, const uint8_t* codes, const Rounded& x, int64_t row, int from, float* made) {
    constexpr int TOGETHER = V::together(F::BITS);
    typename V::Float total[N];
    for (int r = 0; r < N; ++r) total[r] = V::zero();
    for (int64_t g = 0; g < x.groups; ++g, codes += F::CODES) {
        // Into the second cache: the first one waits for too few lines at a time to keep the memory busy. Blocks follow
        // each other: as far into a block as this group is, so that the next one's scales have their turn too.
        for (int64_t line = 0; line < F::EACH; line += 64) __builtin_prefetch(scales + AHEAD + g * F::EACH + line, 0, 2);
        const int8_t* numbers = x.codes + x.slot(row, g) * GROUP;
        const float *scale = x.scale + x.slot(row, g), *sum = x.sum + x.slot(row, g);
        const int32_t* start = x.start + x.template first_start<F>(row, g);
        const auto own = scales_of<F>(scales, g, from);
        const auto less = V::mul(own.scale[0], V::all(-SHIFTED));
        typename V::Float scaled[N];
#pragma GCC unroll 2
        for (int part = 0; part < F::PARTS; ++part) {
            typename V::Int sums[N];
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r) sums[r] = V::all(start[part * CHUNK + r]);
            [[maybe_unused]] typename V::Int pairs[N];
#pragma GCC unroll 8
            for (int j = part * 8 / F::PARTS; j < (part + 1) * 8 / F::PARTS; ++j) {
                const auto code = codes_of<F>(codes, j, from);
#pragma GCC unroll 16
                for (int r = 0; r < N; ++r) {
                    int32_t four;
                    std::memcpy(&four, numbers + r * GROUP + 4 * j, 4);
                    if constexpr (F::BITS == 8) sums[r] = V::dot_eight(sums[r], code, V::all(four));
                    else if constexpr (TOGETHER == 1) sums[r] = V::dot(sums[r], code, V::all(four));
                    else {
                        const auto two = V::pairs(code, V::all(four));
                        pairs[r] = j % TOGETHER ? V::add_pairs(pairs[r], two) : two;
                        if (j % TOGETHER == TOGETHER - 1) sums[r] = V::add(sums[r], pairs[r]);
                    }
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < N; ++r)
                scaled[r] = part ? V::fma(V::floats(sums[r]), own.scale[part], scaled[r])
                                 : V::times(sums[r], own.scale[0], less);
        }
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) {
            total[r] = V::fma(scaled[r], V::all(scale[r]), total[r]);
            if constexpr (F::MINIMUM) total[r] = V::less(own.minimum, V::all(sum[r]), total[r]);
        }
    }
    for (int r = 0; r < N; ++r) V::store(made + r * CHANNELS + from, total[r]);
}

// Products of up to N rows; more are computed than are wanted where that spares a kind of its own.
template <class F, int N = Vec::MOST>
void multiply_rows(
    int rows, const uint8_t* scales, const uint8_t* codes, const Rounded& x, int64_t row, int from, float* made
) {
    constexpr int NEXT = N > 8 ? N - 4 : N > 4 ? N - 2 : N - 1;
    if constexpr (NEXT > 0) {
        if (rows <= NEXT) return multiply_rows<F, NEXT>(rows, scales, codes, x, row, from, made);
    }
    multiply<F, N>(scales, codes, x, row, from, made);
}

// Rows of a matrix that are not one after the other: `run` of them are, a multiple of CHANNELS if there are several runs,
// which begin `step` apart.
struct Runs {
    int64_t run, step;

    int64_t at(int64_t row) const { return row < run ? row : row / run * step + row % run; }
};

// Inside a parallel region. y [rows, high] = x [rows, width] times the weights, plus bias and more [rows, high], each of
// which may be null; the bias has a number for each row of weights, at its place.
template <class F>
void product(
    const uint8_t* packed, const Runs& runs, int64_t high, int64_t width, const float* x, int64_t rows, const float* bias,
    const float* more, float* y, Room& room
) {
    static_assert(CHUNK % Vec::MOST == 0, "rows that are multiplied together lie in one chunk");
    constexpr int64_t TILE = 64;  // rows whose codes stay in the cache while a block of weights is read
    const int64_t blocks = (high + CHANNELS - 1) / CHANNELS, bytes = F::block(width);
    const Rounded rounded = room.of(width);
#pragma omp for
    for (int64_t at = 0; at < rows * rounded.groups; ++at)
        round_group<F>(x + at * GROUP, rounded, at / rounded.groups, at % rounded.groups);
    for (int64_t top = 0; top < rows; top += TILE) {
#pragma omp for nowait
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * CHANNELS, place = runs.at(first);
            const uint8_t* scales = packed + place / CHANNELS * bytes;
            const uint8_t* codes = scales + F::scales(width);
            const int64_t many = std::min<int64_t>(CHANNELS, high - first);
            const int64_t end = std::min(rows, top + TILE);
            for (int64_t row = top; row < end; row += Vec::MOST) {
                const int now = int(std::min<int64_t>(Vec::MOST, end - row));
                alignas(64) float made[Vec::MOST * CHANNELS];
                for (int from = 0; from < CHANNELS; from += Vec::LANES)
                    multiply_rows<F>(now, scales, codes, rounded, row, from, made);
                for (int r = 0; r < now; ++r)
                    for (int64_t n = 0; n < many; ++n) {
                        float sum = made[r * CHANNELS + n];
                        if (bias) sum += bias[place + n];
                        if (more) sum += more[(row + r) * high + first + n];
                        y[(row + r) * high + first + n] = sum;
                    }
            }
        }
    }
#pragma omp barrier
}

// --- single weights -----------------------------------------------------------------------------------
template <class F>
uint8_t code_at(const uint8_t* codes, int k, int n) {
    const int j = k / 4, at = 4 * n + k % 4;
    if (F::BITS == 8) return codes[64 * j + at];
    uint8_t code = codes[64 * (j % 4) + at] >> (j < 4 ? 0 : 4) & 15;
    for (int bit = 4; bit < F::BITS; ++bit)
        code |= uint8_t((codes[256 + 64 * (bit - 4) + 8 * j + at / 8] >> at % 8 & 1) << bit);
    return code;
}

template <class F>
void rows(const uint8_t* packed, int64_t width, const int64_t* ids, int64_t count, float* made) {
    for (int64_t i = 0; i < count; ++i) {
        const int n = int(ids[i] % CHANNELS), from = n / Vec::LANES * Vec::LANES;
        const uint8_t* scales = packed + ids[i] / CHANNELS * F::block(width);
        const uint8_t* codes = scales + F::scales(width);
        for (int64_t g = 0; g < F::groups(width); ++g) {
            const auto own = scales_of<F>(scales, g, from);
            float scale[F::PARTS][Vec::LANES], minimum[Vec::LANES] = {};
            for (int part = 0; part < F::PARTS; ++part) Vec::store(scale[part], own.scale[part]);
            if constexpr (F::MINIMUM) Vec::store(minimum, own.minimum);
            for (int k = 0; k < GROUP; ++k) {
                const int code = code_at<F>(codes + g * F::CODES, k, n) - F::OFFSET;
                made[i * width + g * GROUP + k] = scale[k / F::SCALED][n - from] * float(code) - minimum[n - from];
            }
        }
    }
}

// The kind of a number, in the order of FORMATS in layout.py.
template <class Call>
int64_t with_format(int format, Call call) {
    switch (format) {
        case 0: return call(Format<4, 32, false, false>());
        case 1: return call(Format<4, 32, false, true>());
        case 2: return call(Format<5, 32, false, false>());
        case 3: return call(Format<5, 32, false, true>());
        case 4: return call(Format<8, 32, false, false>());
        case 5: return call(Format<4, 32, true, true>());
        case 6: return call(Format<5, 32, true, true>());
        case 7: return call(Format<6, 16, true, false>());
    }
    return -1;
}

}  // namespace
