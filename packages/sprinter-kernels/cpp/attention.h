// Softmax attention in float32, one query after the other, over keys and values in float32 or bfloat16.
//
// Every sum is made in the order of the keys that the query sees, whatever else is in the forward pass, so that the
// result of a query does not depend on the other queries, on padding or on keys that it does not see.

#pragma once

#include "processor.h"

#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

// COUNT of the keys' products with a query: each sum has the order of `dot`.
template <int COUNT>
INLINE void dots(const float* query, const float* keys, const int64_t* seen, int64_t d, float* made) {
    Floats sums[COUNT] = {};
    int64_t i = 0;
    for (; i + WIDE <= d; i += WIDE) {
        const Floats part = load(query + i);
#pragma GCC unroll 8
        for (int c = 0; c < COUNT; ++c) sums[c] += part * load(keys + seen[c] * d + i);
    }
    if constexpr (COUNT % 4 == 0) {
#pragma GCC unroll 2
        for (int c = 0; c < COUNT; c += 4) {
            const Four four = totals(sums[c], sums[c + 1], sums[c + 2], sums[c + 3]);
            std::memcpy(made + c, &four, sizeof four);
        }
    } else {
        for (int c = 0; c < COUNT; ++c) made[c] = total(sums[c]);
    }
    for (int c = 0; i < d && c < COUNT; ++c) {
        float rest = 0.0f;
        for (int64_t k = i; k < d; ++k) rest += query[k] * keys[seen[c] * d + k];
        made[c] += rest;
    }
}

float dot(const float* a, const float* b, int64_t d) {
    const int64_t first = 0;
    float made;
    dots<1>(a, b, &first, d, &made);
    return made;
}

float sum(const float* x, int64_t d) {
    Floats sums = {};
    int64_t i = 0;
    for (; i + WIDE <= d; i += WIDE) sums += load(x + i);
    float rest = 0.0f;
    for (; i < d; ++i) rest += x[i];
    return total(sums) + rest;
}

// Scores in place -> weights; the sum of the weights' inverse. `scores` has room for whole vectors.
float soften(float* scores, int64_t many, float scale, float cap) {
    const int64_t whole = (many + WIDE - 1) / WIDE * WIDE;
    for (int64_t c = 0; c < many; ++c) scores[c] *= scale;
    if (cap > 0.0f)
        for (int64_t c = 0; c < many; ++c) scores[c] = cap * std::tanh(scores[c] / cap);
    Floats most = all(-INFINITY), poison = {}, sum = {};  // poison: not a number if one of the scores is none
    std::fill(scores + many, scores + whole, 0.0f);
    for (int64_t c = 0; c < whole; c += WIDE) poison += load(scores + c) * 0.0f;
    std::fill(scores + many, scores + whole, -INFINITY);
    for (int64_t c = 0; c < whole; c += WIDE) most = larger(most, load(scores + c));
    const float highest = most_of(most);
    for (int64_t c = 0; c < whole; c += WIDE) {
        const Floats part = exponential(load(scores + c) - highest);
        store(scores + c, part);
        sum += part;
    }
    return 1.0f / total(sum) + total(poison);
}

// made [d] += the weighted sum of values, one after the other.
INLINE void add_values(
    const float* weights, const float* values, const int64_t* seen, int64_t many, int64_t d, float* made
) {
    int64_t i = 0;
    for (; i + 4 * WIDE <= d; i += 4 * WIDE) {
        Floats sums[4];
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) sums[part] = load(made + i + WIDE * part);
        for (int64_t c = 0; c < many; ++c) {
            const float* value = values + seen[c] * d + i;
#pragma GCC unroll 4
            for (int part = 0; part < 4; ++part) sums[part] += load(value + WIDE * part) * weights[c];
        }
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part) store(made + i + WIDE * part, sums[part]);
    }
    for (int64_t c = 0; c < many && i < d; ++c)
        for (int64_t k = i; k < d; ++k) made[k] += weights[c] * values[seen[c] * d + k];
}

// The nearest number, to even ones from the middle; NaN stays NaN.
inline Bfloat16 rounded(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, none = bits >> 16 | 0x40;
    return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? none : up)};
}

// Keys or values, in float32 or, if `half`, in bfloat16.
struct Held {
    void* at;
    bool half;

    // Vector `number` of d = x.
    void put(int64_t number, const float* x, int64_t d) const {
        if (!half) {
            std::memcpy(static_cast<float*>(at) + number * d, x, size_t(d) * sizeof(float));
            return;
        }
        Bfloat16* to = static_cast<Bfloat16*>(at) + number * d;
        for (int64_t i = 0; i < d; ++i) to[i] = rounded(x[i]);
    }
};

constexpr int64_t KEYS = 32;  // that are read together

struct InOrder {
    int64_t each[KEYS];
    constexpr InOrder() : each() {
        for (int64_t i = 0; i < KEYS; ++i) each[i] = i;
    }
};
constexpr InOrder IN_ORDER;

// Some vectors in float32, and their numbers there.
struct Vectors {
    const float* from;
    const int64_t* seen;
};

// Vectors `seen`, at most KEYS, of those from `first` on; room [KEYS, d] is for those in bfloat16.
INLINE Vectors widened(const Held& held, int64_t first, const int64_t* seen, int64_t count, int64_t d, float* room) {
    if (!held.half) return {static_cast<const float*>(held.at) + first * d, seen};
    const Bfloat16* from = static_cast<const Bfloat16*>(held.at) + first * d;
    for (int64_t c = 0; c < count; ++c) {
        const Bfloat16* one = from + seen[c] * d;
        int64_t i = 0;
        for (; i + Vec::LANES <= d; i += Vec::LANES) Vec::store(room + c * d + i, Vec::numbers(one + i));
        for (; i < d; ++i) {
            const uint32_t bits = uint32_t(one[i].bits) << 16;
            std::memcpy(room + c * d + i, &bits, sizeof bits);
        }
    }
    return {room, IN_ORDER.each};
}

struct Attention {
    // query [batch, n, heads, d]; key and value [rows, kv, slots, d], of which the first `keys` slots may be seen. mask
    // [batch, n, keys] of bytes with strides of the first two axes, or null: a query sees the keys up to its own, which
    // are the last n. rows: for each of the batch, where its keys and values are, if not in its own place, or null. cap:
    // of the scores, 0 for none.
    const float* query;
    Held key, value;
    const uint8_t* mask;
    const int64_t *mask_step, *rows;
    int64_t batch, heads, kv, n, slots, keys, d;
    float scale, cap;
};

// Query i of the heads that share keys and values `own`. A block of keys is read for all of them while it is in the cache.
// D: their size, which compilers then unroll loops for; 0: any.
template <int64_t D>
void attend(
    const Attention& a, int64_t b, int64_t i, int64_t own, const std::vector<int64_t>& seen,
    std::vector<float>& scores, float* made
) {
    constexpr int TOGETHER = 4;
    const int64_t d = D ? D : a.d;
    const int64_t group = a.heads / a.kv, row = a.rows ? a.rows[b] : b, many = int64_t(seen.size());
    const int64_t room = (many + WIDE - 1) / WIDE * WIDE;
    const int64_t held = (row * a.kv + own) * a.slots, wide = a.key.half ? KEYS * d : 0;
    const float* query = a.query + ((b * a.n + i) * a.heads + own * group) * d;
    if (int64_t(scores.size()) < group * (room + 1) + wide) scores.resize(size_t(group * (room + 1) + wide));
    float* share = scores.data() + group * room;  // of each head: what its weights are multiplied by
    float* block = share + group;
    for (int64_t first = 0; first < many; first += KEYS) {
        const int64_t count = std::min(many - first, KEYS);
        const Vectors keys = widened(a.key, held, &seen[first], count, d, block);
        for (int64_t h = 0; h < group; ++h) {
            const float* asked = query + h * d;
            float* own_scores = &scores[h * room + first];
            int64_t c = 0;
            for (; c + TOGETHER <= count; c += TOGETHER)
                dots<TOGETHER>(asked, keys.from, keys.seen + c, d, own_scores + c);
            for (; c < count; ++c) dots<1>(asked, keys.from, keys.seen + c, d, own_scores + c);
        }
    }
    std::fill(made, made + group * d, 0.0f);
    for (int64_t h = 0; h < group; ++h) share[h] = soften(scores.data() + h * room, many, a.scale, a.cap);
    for (int64_t first = 0; first < many; first += KEYS) {
        const int64_t count = std::min(many - first, KEYS);
        const Vectors values = widened(a.value, held, &seen[first], count, d, block);
        for (int64_t h = 0; h < group; ++h)
            add_values(&scores[h * room + first], values.from, values.seen, count, d, made + h * d);
    }
    for (int64_t h = 0; h < group; ++h)
        for (int64_t k = 0; k < d; ++k) made[h * d + k] *= share[h];
}

// Inside a parallel region. made [batch, n, heads, d].
void attend_all(const Attention& a, float* made) {
    std::vector<int64_t> seen;  // keys
    std::vector<float> scores;
#pragma omp for collapse(2)
    for (int64_t b = 0; b < a.batch; ++b)
        for (int64_t task = 0; task < a.kv * a.n; ++task) {
            const int64_t i = task / a.kv, own = task % a.kv;
            const uint8_t* mask = a.mask ? a.mask + b * a.mask_step[0] + i * a.mask_step[1] : nullptr;
            seen.clear();
            for (int64_t k = 0; k < a.keys; ++k)
                if (mask ? mask[k] : k <= a.keys - a.n + i) seen.push_back(k);
            float* to = made + ((b * a.n + i) * a.heads + own * (a.heads / a.kv)) * a.d;
            if (a.d == 64) attend<64>(a, b, i, own, seen, scores, to);
            else if (a.d == 128) attend<128>(a, b, i, own, seen, scores, to);
            else attend<0>(a, b, i, own, seen, scores, to);
        }
}

}  // namespace
