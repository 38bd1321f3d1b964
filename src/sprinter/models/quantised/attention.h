// Softmax attention in float32, one query after the other.
//
// Every sum is made in the order of the keys that the query sees, whatever else is in the forward pass, so that the
// result of a query does not depend on the other queries, on padding or on keys that it does not see.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int WIDE = 16;
typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef float Half __attribute__((vector_size(2 * WIDE)));
typedef float Quarter __attribute__((vector_size(WIDE)));

Floats load(const float* from) {
    Floats made;
    std::memcpy(&made, from, sizeof made);
    return made;
}

float total(Floats x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof halves);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    const Quarter sum = quarters[0] + quarters[1];
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

float dot(const float* a, const float* b, int64_t d) {
    Floats sum = {};
    int64_t i = 0;
    for (; i + WIDE <= d; i += WIDE) sum += load(a + i) * load(b + i);
    float rest = 0.0f;
    for (; i < d; ++i) rest += a[i] * b[i];
    return total(sum) + rest;
}

// e^x for x <= 0, to about 1e-7 of its value; 0 below -87.
float exponential(float x) {
    const float rounded = std::nearbyint(std::max(x, -87.0f) * 1.44269504f);
    const float r = (std::max(x, -87.0f) - rounded * 0.693145752f) - rounded * 1.42860677e-6f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const int32_t bits = (int32_t(rounded) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : y * power;
}

struct Scratch {
    std::vector<int64_t> seen;  // keys
    std::vector<float> scores;
};

void attend(
    const float* query, const float* keys, const float* values, int64_t key_step, int64_t value_step, int64_t d,
    int64_t d_v, float scale, float cap, Scratch& scratch, float* made
) {
    const int64_t many = int64_t(scratch.seen.size());
    float* scores = scratch.scores.data();
    float largest = -INFINITY;
    for (int64_t c = 0; c < many; ++c) {
        float score = dot(query, keys + scratch.seen[c] * key_step, d) * scale;
        if (cap > 0.0f) score = cap * std::tanh(score / cap);
        scores[c] = score;
        largest = std::max(largest, score);
    }
    float poison = 0.0f;  // not a number if one of the scores is none
    for (int64_t c = 0; c < many; ++c) poison += scores[c] * 0.0f;
    const int64_t whole = (many + WIDE - 1) / WIDE * WIDE;
    for (int64_t c = 0; c < many; ++c) scores[c] = exponential(scores[c] - largest);
    std::fill(scores + many, scores + whole, 0.0f);
    Floats sum = {};
    for (int64_t c = 0; c < whole; c += WIDE) sum += load(scores + c);
    const float share = 1.0f / total(sum) + poison;
    std::fill(made, made + d_v, 0.0f);
    int64_t i = 0;
    for (; i + 4 * WIDE <= d_v; i += 4 * WIDE) {
        Floats sums[4] = {};
        for (int64_t c = 0; c < many; ++c) {
            const float* value = values + scratch.seen[c] * value_step + i;
            for (int part = 0; part < 4; ++part) sums[part] += scores[c] * load(value + WIDE * part);
        }
        std::memcpy(made + i, sums, sizeof sums);
    }
    for (int64_t c = 0; c < many; ++c)
        for (int64_t k = i; k < d_v; ++k) made[k] += scores[c] * values[scratch.seen[c] * value_step + k];
    for (int64_t k = 0; k < d_v; ++k) made[k] *= share;
}

struct Attention {
    // query [batch, heads, n, d], key and value [batch, kv, keys, d and d_v]: strides of the first three axes in numbers;
    // mask [batch, n, keys] of bytes with strides of the first two axes, or null: a query sees the keys up to its own,
    // which are the last n. rows: for each of the batch, where its keys and values are, if not in its own place, or null.
    // cap: of the scores, 0 for none.
    const float* query;
    const int64_t* query_step;
    const float* key;
    const int64_t* key_step;
    const float* value;
    const int64_t* value_step;
    const uint8_t* mask;
    const int64_t* mask_step;
    const int64_t* rows;
    int64_t batch, heads, kv, n, keys, d, d_v;
    float scale, cap;
};

// Inside a parallel region. made [batch, n, heads, d_v].
void attend_all(const Attention& a, float* made) {
    Scratch scratch;
    scratch.scores.resize(size_t(a.keys + WIDE));
#pragma omp for collapse(2)
    for (int64_t b = 0; b < a.batch; ++b)
        for (int64_t task = 0; task < a.kv * a.n; ++task) {
            const int64_t i = task / a.kv, own = task % a.kv, group = a.heads / a.kv;
            const int64_t row = a.rows ? a.rows[b] : b;
            scratch.seen.clear();
            for (int64_t k = 0; k < a.keys; ++k)
                if (a.mask ? a.mask[b * a.mask_step[0] + i * a.mask_step[1] + k] : k <= a.keys - a.n + i)
                    scratch.seen.push_back(k);
            for (int64_t h = own * group; h < (own + 1) * group; ++h)
                attend(
                    a.query + b * a.query_step[0] + h * a.query_step[1] + i * a.query_step[2],
                    a.key + row * a.key_step[0] + own * a.key_step[1],
                    a.value + row * a.value_step[0] + own * a.value_step[1], a.key_step[2], a.value_step[2], a.d, a.d_v,
                    a.scale, a.cap, scratch, made + ((b * a.n + i) * a.heads + h) * a.d_v
                );
        }
}

}  // namespace
