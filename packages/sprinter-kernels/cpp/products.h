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

#include "processor.h"

#include <vector>

namespace {

constexpr int CHANNELS = 16, GROUP = 32, SUPER = 256;
constexpr int64_t AHEAD = 8192;  // bytes between what is used and what is fetched

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

// --- activations -----------------------------------------------------------------------------------------------------
constexpr int CHUNK = 16 / Vec::MOST * Vec::MOST;  // rows whose codes of a group lie together

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
        for (int k = part * F::SCALED; k < (part + 1) * F::SCALED; k += WIDE)
            sum += store_bytes(made.codes + at * GROUP + k, integers(nearest(load(x + k) * times)));
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

// Sums of 32-bit integers += four codes of each channel times four numbers, those of row j of the group's codes. `pairs`:
// the sums of 16 bits that are not yet part of `sum`.
template <class F, class V>
inline void add_row(int j, typename V::Int codes, typename V::Int four, typename V::Int& sum, typename V::Int& pairs) {
    constexpr int TOGETHER = V::together(F::BITS);
    if constexpr (F::BITS == 8) sum = V::dot_eight(sum, codes, four);
    else if constexpr (TOGETHER == 1) sum = V::dot(sum, codes, four);
    else {
        const auto two = V::pairs(codes, four);
        pairs = V::here(j % TOGETHER ? V::add_pairs(pairs, two) : two);
        if (j % TOGETHER == TOGETHER - 1) sum = V::add(sum, pairs);
    }
}

// Sums of the codes of a group's part times the numbers of N rows, from `start` on. code(j, h): row j of the codes.
template <class F, int N, int H, class V, class Code>
inline void sum_part(
    int part, const int32_t* start, const int8_t* numbers, const Code& code, typename V::Int (&sums)[H][N]
) {
    typename V::Int pairs[H][N];
#pragma GCC unroll 2
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) sums[h][r] = V::all(start[part * CHUNK + r]);
#pragma GCC unroll 8
    for (int j = part * 8 / F::PARTS; j < (part + 1) * 8 / F::PARTS; ++j) {
        typename V::Int codes[H];
#pragma GCC unroll 2
        for (int h = 0; h < H; ++h) codes[h] = code(j, h);
#pragma GCC unroll 16
        for (int r = 0; r < N; ++r) {
            const auto four = V::four(numbers + r * GROUP + 4 * j);
#pragma GCC unroll 2
            for (int h = 0; h < H; ++h) add_row<F, V>(j, codes[h], four, sums[h][r], pairs[h][r]);
        }
    }
}

// The sums of a group in float32, with that of another part of it before.
template <class F, class V>
inline typename V::Float scaled_sum(
    int part, typename V::Int sum, const Scales<F>& own, typename V::Float less, const typename V::Float& before
) {
    return part ? V::fma(V::floats(sum), own.scale[part], before) : V::times(sum, own.scale[0], less);
}

template <class F, class V>
inline typename V::Float add_group(
    typename V::Float total, typename V::Float scaled, const Scales<F>& own, float scale, float sum
) {
    total = V::fma(scaled, V::all(scale), total);
    if constexpr (F::MINIMUM) total = V::less(own.minimum, V::all(sum), total);
    return total;
}

// Into the second cache: the first one waits for too few lines at a time to keep the memory busy. Blocks follow each
// other: as far into a block as group g is, so that the next one's scales have their turn too.
template <class F>
inline void fetch_ahead(const uint8_t* scales, int64_t g) {
    for (int64_t line = 0; line < F::EACH; line += 64) __builtin_prefetch(scales + AHEAD + g * F::EACH + line, 0, 2);
}

// N rows times H vectors of channels.
template <class F, int N, int H, class V = Vec>
void multiply(const uint8_t* scales, const uint8_t* codes, const Rounded& x, int64_t row, int first, float* made) {
    typename V::Float total[H][N];
    for (int i = 0; i < H * N; ++i) total[i / N][i % N] = V::zero();
    for (int64_t g = 0; g < x.groups; ++g, codes += F::CODES) {
        fetch_ahead<F>(scales, g);
        const int8_t* numbers = x.codes + x.slot(row, g) * GROUP;
        const float *scale = x.scale + x.slot(row, g), *sum = x.sum + x.slot(row, g);
        const int32_t* start = x.start + x.template first_start<F>(row, g);
        typename V::Float scaled[H][N];
#pragma GCC unroll 2
        for (int part = 0; part < F::PARTS; ++part) {
            typename V::Int sums[H][N];
            const auto code = [&](int j, int h) { return codes_of<F>(codes, j, first + h * V::LANES); };
            sum_part<F, N, H, V>(part, start, numbers, code, sums);
#pragma GCC unroll 2
            for (int h = 0; h < H; ++h) {
                const auto own = scales_of<F>(scales, g, first + h * V::LANES);
                const auto less = V::mul(own.scale[0], V::all(-SHIFTED));
#pragma GCC unroll 16
                for (int r = 0; r < N; ++r) scaled[h][r] = scaled_sum<F, V>(part, sums[h][r], own, less, scaled[h][r]);
                if (part < F::PARTS - 1) continue;
#pragma GCC unroll 16
                for (int r = 0; r < N; ++r) total[h][r] = add_group<F, V>(total[h][r], scaled[h][r], own, scale[r], sum[r]);
            }
        }
    }
    for (int h = 0; h < H; ++h)
        for (int r = 0; r < N; ++r) V::store(made + r * CHANNELS + first + h * V::LANES, total[h][r]);
}

// Products of up to N rows; more are computed than are wanted where that spares a kind of its own.
template <class F, int N = Vec::MOST>
void multiply_rows(
    int rows, const uint8_t* scales, const uint8_t* codes, const Rounded& x, int64_t row, float* made
) {
    constexpr int NEXT = N > 8 ? N - 4 : N > 4 ? N - 2 : N - 1;
    if constexpr (NEXT > 0) {
        if (rows <= NEXT) return multiply_rows<F, NEXT>(rows, scales, codes, x, row, made);
    }
    constexpr int H = N <= 2 && CHANNELS > Vec::LANES ? 2 : 1;  // memory is read once, while sums take less time
    for (int from = 0; from < CHANNELS; from += H * Vec::LANES) multiply<F, N, H>(scales, codes, x, row, from, made);
}

// The same for any number of rows: the codes of a group are unpacked once, and its sums of all rows are made, four rows
// and all channels at a time. `row` is the first of a chunk; `made` has room for whole fours.
template <class F, class V = Vec>
void multiply_many(int rows, const uint8_t* scales, const uint8_t* codes, const Rounded& x, int64_t row, float* made) {
    constexpr int H = CHANNELS / V::LANES, N = 4;
    for (int i = 0; i < (rows + N - 1) / N * N * CHANNELS; ++i) made[i] = 0.0f;
    const int64_t top = x.slot(row, 0), step = x.groups * CHUNK;
    for (int64_t g = 0; g < x.groups; ++g, codes += F::CODES) {
        fetch_ahead<F>(scales, g);
        typename V::Int code[8][H];
        Scales<F> own[H];
        typename V::Float less[H];
        for (int h = 0; h < H; ++h) {
            own[h] = scales_of<F>(scales, g, h * V::LANES);
            less[h] = V::mul(own[h].scale[0], V::all(-SHIFTED));
            for (int j = 0; j < 8; ++j) code[j][h] = codes_of<F>(codes, j, h * V::LANES);
        }
        // What is unpacked stays in memory: the sums need the registers.
        asm volatile("" : : "r"(code), "r"(own), "r"(less) : "memory");
        for (int chunk = 0; chunk < rows; chunk += CHUNK) {
            const int64_t at = top + g * CHUNK + chunk / CHUNK * step;
            const int8_t* numbers = x.codes + at * GROUP;
            const float *scale = x.scale + at, *sum = x.sum + at;
            const int32_t* start = x.start + at * F::PARTS;
            float* to = made + chunk * CHANNELS;
            const int end = std::min(rows - chunk, CHUNK);
            for (int r = 0; r < end; r += N, numbers += N * GROUP, scale += N, sum += N, start += N, to += N * CHANNELS) {
                typename V::Float scaled[H][N];
#pragma GCC unroll 2
                for (int part = 0; part < F::PARTS; ++part) {
                    typename V::Int sums[H][N];
                    const auto kept = [&](int j, int h) { return code[j][h]; };
                    sum_part<F, N, H, V>(part, start, numbers, kept, sums);
#pragma GCC unroll 4
                    for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
                        for (int h = 0; h < H; ++h)
                            scaled[h][i] = scaled_sum<F, V>(part, sums[h][i], own[h], less[h], scaled[h][i]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < N; ++i)
#pragma GCC unroll 2
                    for (int h = 0; h < H; ++h) {
                        float* total = to + i * CHANNELS + h * V::LANES;
                        V::store(total, add_group<F, V>(V::numbers(total), scaled[h][i], own[h], scale[i], sum[i]));
                    }
            }
        }
    }
}

// Rows of a matrix that are not one after the other: `run` of them are, a multiple of CHANNELS if there are several runs,
// which begin `step` apart.
struct Runs {
    int64_t run, step;

    int64_t at(int64_t row) const { return row < run ? row : row / run * step + row % run; }
};

// y [many] = made + bias + more.
inline void finish(const float* made, const float* bias, const float* more, float* y, int64_t many) {
    static_assert(CHANNELS == WIDE, "a block's channels are one vector");
    if (many == CHANNELS) {
        Floats sum = load(made);
        if (bias) sum += load(bias);
        if (more) sum += load(more);
        return store(y, sum);
    }
    for (int64_t n = 0; n < many; ++n) {
        float sum = made[n];
        if (bias) sum += bias[n];
        if (more) sum += more[n];
        y[n] = sum;
    }
}

// Products of the same rows with several matrices of a kind, one after the other: only the first rounds the rows, and
// threads wait for each other only after the last.
struct Turn {
    bool first = true, last = true;
};

// Inside a parallel region. y [rows, high] = x [rows, width] times the weights, plus bias and more [rows, high], each of
// which may be null; the bias has a number for each row of weights, at its place.
template <class F>
void product(
    const uint8_t* packed, const Runs& runs, int64_t high, int64_t width, const float* x, int64_t rows, const float* bias,
    const float* more, float* y, Room& room, Turn turn
) {
    static_assert(CHUNK % Vec::MOST == 0, "rows that are multiplied together lie in one chunk");
    constexpr int64_t TILE = (64 + CHUNK - 1) / CHUNK * CHUNK;  // rows whose codes stay in the cache with a block of weights
    static_assert(CHUNK % 4 == 0, "rows that are multiplied by fours lie in one chunk");
    const int64_t blocks = (high + CHANNELS - 1) / CHANNELS, bytes = F::block(width);
    const Rounded rounded = room.of(width);
    if (turn.first) {
#pragma omp for
        for (int64_t at = 0; at < rows * rounded.groups; ++at)
            round_group<F>(x + at * GROUP, rounded, at / rounded.groups, at % rounded.groups);
    }
    const int64_t step = Vec::MANY && rows >= Vec::MANY ? TILE : Vec::MOST;
    for (int64_t top = 0; top < rows; top += TILE) {
#pragma omp for nowait
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * CHANNELS, place = runs.at(first);
            const uint8_t* scales = packed + place / CHANNELS * bytes;
            const uint8_t* codes = scales + F::scales(width);
            const int64_t many = std::min<int64_t>(CHANNELS, high - first);
            const int64_t end = std::min(rows, top + TILE);
            for (int64_t row = top; row < end; row += step) {
                const int now = int(std::min<int64_t>(step, end - row));
                alignas(64) float made[TILE * CHANNELS];
                if constexpr (Vec::MANY > 0) {
                    if (step == TILE) multiply_many<F>(now, scales, codes, rounded, row, made);
                }
                if (step != TILE) multiply_rows<F>(now, scales, codes, rounded, row, made);
                for (int r = 0; r < now; ++r) {
                    const int64_t to = (row + r) * high + first;
                    finish(made + r * CHANNELS, bias ? bias + place : nullptr, more ? more + to : nullptr, y + to, many);
                }
            }
        }
    }
    if (turn.last) {
#pragma omp barrier
    }
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
