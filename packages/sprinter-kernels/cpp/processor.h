// Vectors of the processor: sums of 16 channels at a time, of 8 or of 4.

#pragma once

#include "vectors.h"

namespace {

// A sum that starts at SHIFT has the bits of SHIFTED + sum, if it is below 2^22. Times a scale of at most 22 bits,
// SHIFTED is exact: one fused operation makes of the sum what converting and multiplying would.
constexpr int32_t SHIFT = 0x4b400000;
constexpr float SHIFTED = 12582912.0f;

struct Bfloat16 {
    uint16_t bits;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)

struct Vec {
    static constexpr int LANES = 16, MOST = 12, MANY = 0;  // rows, from which on multiply_many pays; 0: never
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
    static Int four(const int8_t* at) {
        int32_t made;
        std::memcpy(&made, at, sizeof made);
        return all(made);
    }
    static Int load(const uint8_t* at) { return _mm512_loadu_si512(at); }
    static Int low(Int x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
    static Int high(Int x) { return low(_mm512_srli_epi16(x, 4)); }
    static Int with_bit(Int x, const uint8_t* plane, int bit) {
        uint64_t mask;
        std::memcpy(&mask, plane, 8);
        return _mm512_mask_add_epi8(x, mask, x, _mm512_set1_epi8(char(1 << bit)));
    }
    static Float here(Float x) {  // see below
        asm("" : "+v"(x));
        return x;
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
    static void totals(Float a, Float b, Float c, Float d, float* made) {
        const Four four = ::totals(a, b, c, d);
        std::memcpy(made, &four, sizeof four);
    }
};

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct Vec {
    static constexpr int LANES = 8, MOST = 8, MANY = 12;
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
    // Returns x, which the compiler must compute here and hold in a register. Else it delays sums until it runs out of
    // registers, or loads a number again for each product.
    static Float here(Float x) {
        asm("" : "+x"(x));
        return x;
    }
    static Int here(Int x) {
        asm volatile("" : "+x"(x));
        return x;
    }
    static Int four(const int8_t* at) {
        int32_t made;
        std::memcpy(&made, at, sizeof made);
        return all(made);
    }
    static Int pairs(Int codes, Int numbers) { return _mm256_maddubs_epi16(codes, numbers); }
    static Int add_pairs(Int a, Int b) { return _mm256_add_epi16(a, b); }
    static Int add(Int sum, Int pairs) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    static Int dot_eight(Int sum, Int codes, Int numbers) {
        const Int offset = _mm256_xor_si256(codes, _mm256_set1_epi8(char(0x80)));  // codes - 128
        return here(add(sum, pairs(_mm256_abs_epi8(offset), _mm256_sign_epi8(numbers, offset))));
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
    static void totals(Float a, Float b, Float c, Float d, float* made) {
        const Four four = ::totals(a, b, c, d);
        std::memcpy(made, &four, sizeof four);
    }
};

#elif defined(__ARM_FEATURE_DOTPROD)

struct Vec {
    static constexpr int LANES = 4, MOST = 8, MANY = 0;
    using Float = float32x4_t;
    using Int = int32x4_t;
    static constexpr bool SIGNED = true;  // both factors of a product have a sign
    static constexpr int together(int) { return 1; }

    static Float zero() { return all(0.0f); }
    static Float halves(const uint8_t* at) {
        uint16x4_t made;
        std::memcpy(&made, at, sizeof made);
        return vcvt_f32_f16(vreinterpret_f16_u16(made));
    }
    static Float bytes(const uint8_t* at) {
        uint32_t made;
        std::memcpy(&made, at, sizeof made);
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(made)))));
    }
    static Float all(float x) { return vdupq_n_f32(x); }
    static Float mul(Float a, Float b) { return vmulq_f32(a, b); }
    static Float fma(Float a, Float b, Float c) { return vfmaq_f32(c, a, b); }
    static Float less(Float a, Float b, Float c) { return vfmsq_f32(c, a, b); }
    static Float floats(Int x) { return vcvtq_f32_s32(x); }
    static Float times(Int shifted, Float scale, Float less) { return fma(vreinterpretq_f32_s32(shifted), scale, less); }
    static Int all(int32_t x) { return vdupq_n_s32(x); }
    static Int four(const int8_t* at) {
        int32_t made;
        std::memcpy(&made, at, sizeof made);
        return all(made);
    }
    static Int load(const uint8_t* at) { return vreinterpretq_s32_u8(vld1q_u8(at)); }
    static Int low(Int x) { return vandq_s32(x, all(0x0f0f0f0f)); }
    static Int high(Int x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
    static Int with_bit(Int x, const uint8_t* plane, int bit) {
        const uint8x8_t one = vcreate_u8(0x8040201008040201);
        const uint8x16_t mask = vcombine_u8(vdup_n_u8(plane[0]), vdup_n_u8(plane[1]));
        const uint8x16_t set = vandq_u8(vtstq_u8(mask, vcombine_u8(one, one)), vdupq_n_u8(uint8_t(1 << bit)));
        return vorrq_s32(x, vreinterpretq_s32_u8(set));
    }
    static Float here(Float x) { return x; }
    static Int dot(Int sum, Int codes, Int numbers) {
        return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(numbers));
    }
    static Int dot_eight(Int sum, Int codes, Int numbers) {
        return dot(sum, veorq_s32(codes, all(int32_t(0x80808080))), numbers);  // codes - 128
    }
    static void store(float* at, Float x) { vst1q_f32(at, x); }
    static Float numbers(const float* at) { return vld1q_f32(at); }
    static Float numbers(const Bfloat16* at) {
        uint16x4_t made;
        std::memcpy(&made, at, sizeof made);
        return vreinterpretq_f32_u32(vshll_n_u16(made, 16));
    }
    static float total(Float x) { return ::total(Four(x)); }
    static void totals(Float a, Float b, Float c, Float d, float* made) {
        made[0] = total(a), made[1] = total(b), made[2] = total(c), made[3] = total(d);
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
    static constexpr int LANES = 4, MOST = 2, MANY = 0;
    typedef float Float __attribute__((vector_size(16)));
    typedef int32_t Int __attribute__((vector_size(16)));
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    static constexpr bool SIGNED = false;
    static constexpr int together(int) { return 1; }

    static Float zero() { return Float{0, 0, 0, 0}; }
    static Float here(Float x) { return x; }
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
    static Int four(const int8_t* at) {
        int32_t made;
        std::memcpy(&made, at, sizeof made);
        return all(made);
    }
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
    static void totals(Float a, Float b, Float c, Float d, float* made) {
        made[0] = total(a), made[1] = total(b), made[2] = total(c), made[3] = total(d);
    }
};

#endif

}  // namespace
