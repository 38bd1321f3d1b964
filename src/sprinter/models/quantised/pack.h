// Weights in the order in which products.h reads them, from codes and scales, or from the blocks of a GGUF file.

#pragma once

#include "products.h"

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "codes are moved four at a time");

// Codes that share a 16-bit scale, and their scales.
template <class F>
struct Block {
    static constexpr int CODES = F::NESTED ? SUPER : GROUP, GROUPS = CODES / GROUP;
    uint8_t codes[CODES];
    uint16_t scale, minimum;
    uint8_t fine[GROUPS * F::PARTS], fine_minimum[GROUPS];
};

uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half;
}

// Blocks of GGUF files, as llama.cpp's ggml-common.h lays them out.
template <class F>
struct Stored {
    static constexpr int HEAD = F::MINIMUM ? 4 : 2;  // scale and minimum
    static constexpr bool FIFTH = F::BITS == 5;
    static constexpr int BYTES = F::BITS == 8                ? 34
                                 : F::NESTED && !F::MINIMUM  ? 210
                                 : F::NESTED                 ? HEAD + 12 + FIFTH * 32 + 128
                                                             : HEAD + FIFTH * 4 + 16;

    static void take(const uint8_t* from, Block<F>& made) {
        if constexpr (F::NESTED && !F::MINIMUM) {
            six(from, made);
            return;
        }
        made.scale = half_at(from);
        if constexpr (F::NESTED) {
            made.minimum = half_at(from + 2);
            nested(from + HEAD, made);
        } else {
            if (F::MINIMUM) made.minimum = half_at(from + 2) ^ 0x8000;  // stored as what is added
            plain(from + HEAD, made);
        }
    }

  private:
    static void plain(const uint8_t* from, Block<F>& made) {
        if (F::BITS == 8) {
            for (int k = 0; k < GROUP; ++k) made.codes[k] = from[k] ^ 0x80;
            return;
        }
        uint32_t fifth = 0;
        if (FIFTH) std::memcpy(&fifth, from, 4);
        const uint8_t* low = from + FIFTH * 4;
        for (int k = 0; k < 16; ++k) {
            made.codes[k] = (low[k] & 15) | uint8_t((fifth >> k & 1) << 4);
            made.codes[16 + k] = (low[k] >> 4) | uint8_t((fifth >> (16 + k) & 1) << 4);
        }
    }

    // Q4_K and Q5_K: 12 bytes hold eight scales and eight minima of 6 bits.
    static void nested(const uint8_t* from, Block<F>& made) {
        for (int i = 0; i < 4; ++i) {
            made.fine[i] = from[i] & 63;
            made.fine_minimum[i] = from[4 + i] & 63;
            made.fine[4 + i] = (from[8 + i] & 15) | from[i] >> 6 << 4;
            made.fine_minimum[4 + i] = from[8 + i] >> 4 | from[4 + i] >> 6 << 4;
        }
        const uint8_t *fifth = from + 12, *low = fifth + FIFTH * 32;
        for (int g = 0; g < 8; ++g)
            for (int k = 0; k < GROUP; ++k) {
                uint8_t code = low[g / 2 * 32 + k] >> (g % 2 * 4) & 15;
                if (FIFTH) code |= uint8_t((fifth[k] >> g & 1) << 4);
                made.codes[g * GROUP + k] = code;
            }
    }

    // Q6_K: 128 bytes of low and 64 of high bits, 16 scales of 8 bits.
    static void six(const uint8_t* from, Block<F>& made) {
        const uint8_t *low = from, *high = from + 128;
        for (int g = 0; g < 8; ++g)
            for (int k = 0; k < GROUP; ++k)
                made.codes[g * GROUP + k] = (low[g / 4 * 64 + g % 2 * 32 + k] >> (g % 4 / 2 * 4) & 15) |
                                            uint8_t((high[g / 4 * 32 + k] >> (g % 4 * 2) & 3) << 4);
        std::memcpy(made.fine, from + 192, 16);
        made.scale = half_at(from + 208);
    }
};

// 32 codes of channel n into the codes of its group.
template <class F>
void put_codes(uint8_t* codes, int n, const uint8_t* given) {
    constexpr uint32_t LOW = 0x0f0f0f0f, ONES = 0x01010101;
    uint32_t four[8];
    std::memcpy(four, given, GROUP);
    if (F::BITS == 8) {
        for (int j = 0; j < 8; ++j) std::memcpy(codes + 64 * j + 4 * n, &four[j], 4);
        return;
    }
    for (int j = 0; j < 4; ++j) {
        const uint32_t both = (four[j] & LOW) | (four[j + 4] & LOW) << 4;
        std::memcpy(codes + 64 * j + 4 * n, &both, 4);
    }
    for (int bit = 4; bit < F::BITS; ++bit)
        for (int j = 0; j < 8; ++j) {
            const uint32_t bits = (four[j] >> bit & ONES) * 0x01020408 >> 24 & 15;  // the last bit of each byte
            codes[256 + 64 * (bit - 4) + 8 * j + n / 2] |= uint8_t(bits << (n % 2 * 4));
        }
}

// `take(row, block, made)` gives a block of a row.
template <class F, class Take>
void pack(int64_t high, int64_t width, uint8_t* packed, int threads, Take take) {
    using Own = Block<F>;
    const int64_t bytes = F::block(width), blocks = width / Own::CODES;
    std::memset(packed, 0, (high + CHANNELS - 1) / CHANNELS * bytes);
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < high; first += CHANNELS) {
        uint8_t* scales = packed + first / CHANNELS * bytes;
        uint8_t* codes = scales + F::scales(width);
        Own made;
        for (int n = 0; n < CHANNELS && first + n < high; ++n)
            for (int64_t b = 0; b < blocks; ++b) {
                take(first + n, b, made);
                uint8_t* halves = scales + F::halves_at(b * Own::GROUPS) + 2 * n;
                std::memcpy(halves, &made.scale, 2);
                if (F::MINIMUM) std::memcpy(halves + 2 * CHANNELS, &made.minimum, 2);
                for (int i = 0; i < Own::GROUPS; ++i) {
                    const int64_t g = b * Own::GROUPS + i;
                    if (F::NESTED) {
                        uint8_t* fine = scales + F::fine_at(g) + n;
                        for (int part = 0; part < F::PARTS; ++part)
                            fine[part * CHANNELS] = made.fine[i * F::PARTS + part];
                        if (F::MINIMUM) fine[F::PARTS * CHANNELS] = made.fine_minimum[i];
                    }
                    put_codes<F>(codes + g * F::CODES, n, made.codes + i * GROUP);
                }
            }
    }
}

}  // namespace
