// Weights in the order in which products.h reads them, from the blocks of a GGUF file.

#pragma once

#include "products.h"

namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "codes are moved eight at a time");

constexpr uint64_t LOW = 0x0f0f0f0f0f0f0f0f, ONES = 0x0101010101010101;

uint64_t eight_at(const uint8_t* from) {
    uint64_t eight;
    std::memcpy(&eight, from, 8);
    return eight;
}

uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    return half;
}

// 32 codes, as a packed matrix holds them for a channel.
template <int BITS>
struct Group {
    static constexpr int BYTES = BITS == 8 ? GROUP : GROUP / 2, PLANES = BITS == 8 ? 0 : BITS - 4;
    uint8_t low[BYTES];  // with fewer than 8 bits: the low four bits of code k, and of code 16 + k in the high half
    uint32_t planes[PLANES + 1];  // further bits, that of code k at bit k

    // The low four bits of 32 bytes, or the high ones with `shift` 4.
    void take_low(const uint8_t* from, int shift) {
        for (int k = 0; k < 16; k += 8) {
            const uint64_t first = eight_at(from + k) >> shift & LOW, second = eight_at(from + 16 + k) >> shift & LOW;
            const uint64_t both = first | second << 4;
            std::memcpy(low + k, &both, 8);
        }
    }

    // Bit `bit` of 32 bytes.
    void take_plane(int plane, const uint8_t* from, int bit) {
        uint32_t made = 0;
        for (int k = 0; k < GROUP; k += 8)  // the product brings the last bits of eight bytes together
            made |= uint32_t((eight_at(from + k) >> bit & ONES) * 0x0102040810204080 >> 56) << k;
        planes[plane] = made;
    }

    // Into the codes of a group, whose planes are zeros, as those of channel n.
    void put(uint8_t* codes, int n) const {
        for (int j = 0; j < BYTES / 4; ++j) std::memcpy(codes + 64 * j + 4 * n, low + 4 * j, 4);
        for (int plane = 0; plane < PLANES; ++plane)
            for (int j = 0; j < 8; ++j)
                codes[256 + 64 * plane + 8 * j + n / 2] |= uint8_t((planes[plane] >> (4 * j) & 15) << (n % 2 * 4));
    }
};

// Codes that share a 16-bit scale, and their scales.
template <class F>
struct Block {
    static constexpr int CODES = F::NESTED ? SUPER : GROUP, GROUPS = CODES / GROUP;
    Group<F::BITS> groups[GROUPS];
    uint16_t scale, minimum;
    uint8_t fine[GROUPS * F::PARTS], fine_minimum[GROUPS];
};

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
            plain(from + HEAD, made.groups[0]);
        }
    }

  private:
    static void plain(const uint8_t* from, Group<F::BITS>& made) {
        if (FIFTH) std::memcpy(made.planes, from, 4);
        std::memcpy(made.low, from + FIFTH * 4, sizeof made.low);
        if (F::BITS == 8)
            for (uint8_t& code : made.low) code ^= 0x80;  // stored with a sign
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
        for (int g = 0; g < 8; ++g) {
            made.groups[g].take_low(low + g / 2 * 32, g % 2 * 4);
            if (FIFTH) made.groups[g].take_plane(0, fifth, g);
        }
    }

    // Q6_K: 128 bytes of low and 64 of high bits, 16 scales of 8 bits.
    static void six(const uint8_t* from, Block<F>& made) {
        const uint8_t *low = from, *high = from + 128;
        for (int g = 0; g < 8; ++g) {
            made.groups[g].take_low(low + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4);
            for (int bit = 0; bit < 2; ++bit) made.groups[g].take_plane(bit, high + g / 4 * 32, g % 4 * 2 + bit);
        }
        std::memcpy(made.fine, from + 192, 16);
        made.scale = half_at(from + 208);
    }
};

// From rows of blocks [rows, blocks]; row i is their row order[i].
template <class F>
void pack(
    const uint8_t* stored, const int64_t* order, int64_t high, int64_t width, uint8_t* packed, int threads
) {
    using Own = Block<F>;
    const int64_t bytes = F::block(width), blocks = width / Own::CODES;
    // By one thread: several that touch a new large page at once wait for each other.
    std::memset(packed, 0, (high + CHANNELS - 1) / CHANNELS * bytes);
#pragma omp parallel for num_threads(threads)
    for (int64_t first = 0; first < high; first += CHANNELS) {
        uint8_t* scales = packed + first / CHANNELS * bytes;
        uint8_t* codes = scales + F::scales(width);
        Own made;
        for (int n = 0; n < CHANNELS && first + n < high; ++n)
            for (int64_t b = 0; b < blocks; ++b) {
                Stored<F>::take(stored + (order[first + n] * blocks + b) * Stored<F>::BYTES, made);
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
                    made.groups[i].put(codes + g * F::CODES, n);
                }
            }
    }
}

}  // namespace
