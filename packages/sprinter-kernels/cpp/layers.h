// Decoder layers, and models of them, in one call.

#pragma once

#include "attention.h"
#include "floats.h"
#include "products.h"

#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace {

Room& room(int64_t rows, int64_t width) {
    static thread_local Room kept;
    kept.reserve_rows(rows, width);
    return kept;
}

float* numbers(int64_t count) {
    static thread_local std::vector<float> kept;
    reserve(kept, count);
    return kept.data();
}

struct Matrix {
    int64_t format = 0;
    const uint8_t* packed = nullptr;
    int64_t high = 0, width = 0;
    const float* bias = nullptr;
    int64_t run = 0, step = 0;  // its rows, and numbers of bias, come in runs of so many, which begin so many apart

    // Inside a parallel region.
    void times(const float* x, int64_t rows, const float* more, float* y, Room& room, Turn turn = {}) const {
        const Runs runs = {run, step};
        if (format == FLOAT32)
            return product_floats(reinterpret_cast<const float*>(packed), runs, high, width, x, rows, bias, more, y, turn);
        if (format == BFLOAT16)
            return product_floats(reinterpret_cast<const Bfloat16*>(packed), runs, high, width, x, rows, bias, more, y, turn);
        with_format(int(format), [&](auto kind) {
            product<decltype(kind)>(packed, runs, high, width, x, rows, bias, more, y, room, turn);
            return int64_t(0);
        });
    }
};

// made may be x. centred: take the mean off. offset: is added to the weights.
void normalise(
    const float* x, const float* weight, const float* bias, int64_t size, bool centred, float eps, float offset, float* made
) {
    const float mean = centred ? sum(x, size) / float(size) : 0.0f;
    for (int64_t i = 0; i < size; ++i) made[i] = x[i] - mean;
    const float scale = 1.0f / std::sqrt(dot(made, made, size) / float(size) + eps);
    for (int64_t i = 0; i < size; ++i) made[i] = (offset + weight[i]) * (made[i] * scale);
    for (int64_t i = 0; bias && i < size; ++i) made[i] += bias[i];
}

struct Norm {
    const float *weight = nullptr, *bias = nullptr;  // no weight: there is no such norm
};

struct Layer {
    Matrix q, k, v, o, gate, up, down;  // gate: packed is null where there is none
    // second_norm: before the feed-forward part. after_attention, after_mlp: of what is added to the layer's input.
    Norm norm, query_norm, key_norm, second_norm, after_attention, after_mlp;
    // turned: numbers of a head that its position rotates. activation: of the feed-forward part. kind: which of the masks
    // and angles of a pass are the layer's.
    int64_t width = 0, heads = 0, kv = 0, d = 0, turned = 0, activation = 0, kind = 0;
    bool centred = false, parallel = false;  // norms take the mean off; the feed-forward part reads the layer's input
    // offset: what is added to the norms' weights. scaling, cap: of attention's scores, cap 0 for none.
    double eps = 0, offset = 0, scaling = 1, cap = 0;

    void norm_one(const float* x, const Norm& own, int64_t size, float* made) const {
        normalise(x, own.weight, own.bias, size, centred, float(eps), float(offset), made);
    }

    // Inside a parallel region.
    void norm_rows(const float* x, const Norm& own, int64_t rows, float* made) const {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) norm_one(x + row * width, own, width, made + row * width);
    }

    // Inside a parallel region. Products of the same x [rows, width] with several matrices.
    static void times(
        std::initializer_list<std::pair<const Matrix*, float*>> each, const float* x, int64_t rows, Room& room
    ) {
        for (auto at = each.begin(); at != each.end(); ++at) {
            const auto is_of_kind = [&](auto other) { return other->first->format == at->first->format; };
            const bool first = at == each.begin() || !is_of_kind(at - 1), last = at + 1 == each.end() || !is_of_kind(at + 1);
            at->first->times(x, rows, nullptr, at->second, room, {first, last});
        }
    }

    // Inside a parallel region. made = x + matrix times y, normalised before if there is such a norm; more [rows, width] is
    // room, and made may be x.
    void add(
        const Matrix& matrix, const float* y, const Norm& after, const float* x, int64_t rows, float* more, float* made,
        Room& room
    ) const {
        if (!after.weight) return matrix.times(y, rows, x, made, room);
        matrix.times(y, rows, nullptr, more, room);
        norm_rows(more, after, rows, more);
#pragma omp for
        for (int64_t i = 0; i < rows * width; ++i) made[i] = x[i] + more[i];
    }
};

// Rotate the halves of d numbers, in place.
void rotate(float* x, const float* cosine, const float* sine, int64_t d) {
    for (int64_t i = 0; i < d / 2; ++i) {
        const float a = x[i], b = x[i + d / 2];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + d / 2] = b * cosine[i + d / 2] + a * sine[i + d / 2];
    }
}

enum Activation { SILU, GELU_TANH, GELU };

// x = activation(x), times up if there is one, of rows that are whole groups wide. SiLU, and GELU by tanh, are x times the
// sigmoid of a number.
void activate(float* x, const float* up, int64_t count, int64_t activation) {
#pragma omp for
    for (int64_t i = 0; i < count; i += WIDE) {
        Floats made = load(x + i);
        if (activation == GELU) {
            float apart[WIDE];
            store(apart, made);
            for (float& one : apart) one = 0.5f * one * (1.0f + std::erf(one * 0.70710678118655f));
            made = load(apart);
        } else {
            const Floats z = activation == SILU ? made : made * (made * made * 0.0713548162726f + 1.59576912161f);
            const Floats e = exponential(all(0.0f) - absolute(z));
            made = made * below(z, 0.0f, e, all(1.0f)) / (e + 1.0f);
        }
        store(x + i, up ? made * load(up + i) : made);
    }
}

// Where the tokens of a forward pass go in a layer's cache: keys and values are [batch, kv, slots, d].
struct Places {
    Held keys, values;
    const int64_t *row, *slot;  // of each token
    int64_t slots;
};

// Angles of all positions, [positions, turned], of which a token has one.
struct Turns {
    const float *cosine, *sine;
    const int64_t* position;
};

// Inside a parallel region. A layer up to its cache: x [rows, width] -> q [rows, heads, d], and keys and values in their
// places. hidden [rows, width], k and v [rows, kv, d] are room.
void before(
    const Layer& layer, const float* x, int64_t rows, const Turns& turns, float* hidden, float* q, float* k, float* v,
    const Places& places, Room& room
) {
    const int64_t heads = layer.heads + layer.kv, d = layer.d, all = heads + layer.kv;
    layer.norm_rows(x, layer.norm, rows, hidden);
    layer.times({{&layer.q, q}, {&layer.k, k}, {&layer.v, v}}, hidden, rows, room);
#pragma omp for
    for (int64_t at = 0; at < rows * all; ++at) {
        const int64_t row = at / all, h = at % all;
        const bool query = h < layer.heads, value = h >= heads;
        const int64_t own = query ? h : value ? h - heads : h - layer.heads;
        float* head = query ? q + (row * layer.heads + own) * d : (value ? v : k) + (row * layer.kv + own) * d;
        if (!value) {
            const Norm& own_norm = query ? layer.query_norm : layer.key_norm;
            if (own_norm.weight) layer.norm_one(head, own_norm, d, head);
            const int64_t turn = turns.position[row] * layer.turned;
            rotate(head, turns.cosine + turn, turns.sine + turn, layer.turned);
        }
        if (!query) {
            const int64_t to = (places.row[row] * layer.kv + own) * places.slots + places.slot[row];
            (value ? places.values : places.keys).put(to, head, d);
        }
    }
}

int64_t room_after(const Layer& layer, int64_t rows) {
    return rows * (layer.o.width + 2 * layer.width + 2 * layer.down.width);
}

// Inside a parallel region. The rest of it: attention over the cache, output, and the feed-forward part. made [rows, width]
// may be x; context [room_after] is room.
void after(
    const Layer& layer, const Attention& attention, const float* x, int64_t rows, float* context, float* made, Room& room
) {
    const int64_t inner = layer.down.width;
    float *middle = context + rows * layer.o.width, *hidden = middle + rows * layer.width;
    float *gate = hidden + rows * layer.width, *up = gate + rows * inner;
    attend_all(attention, context);
    layer.add(layer.o, context, layer.after_attention, x, rows, hidden, middle, room);
    layer.norm_rows(layer.parallel ? x : middle, layer.second_norm, rows, hidden);
    if (layer.gate.packed) layer.times({{&layer.gate, gate}, {&layer.up, up}}, hidden, rows, room);
    else layer.up.times(hidden, rows, nullptr, gate, room);
    activate(gate, layer.gate.packed ? up : nullptr, rows * inner, layer.activation);
    layer.add(layer.down, gate, layer.after_mlp, middle, rows, hidden, made, room);
}

// What a pass is given: tokens [batch, n], of which each has a position and goes to slot `slot` of row `row`.
struct Pass {
    int64_t batch, n;
    const int64_t *tokens, *position, *row, *slot;
    // Keys and values of each layer in turn, [rows, kv, slots, d], the first `keys` slots of which may be seen.
    std::vector<Held> caches;
    int64_t slots, keys;
    const int64_t* seen;  // for each of the batch, the row of its keys and values; null: rows 0, 1, ...
    struct Kind {  // of layers
        const float *cosine, *sine;
        const uint8_t* mask;   // [batch, n, keys], or null: a query sees the keys up to its own, which are the last n
        int64_t mask_step[2];  // strides of its first two axes
    };
    std::vector<Kind> kinds;
    std::vector<std::pair<int64_t, float*>> taken;  // layers whose results are wanted, and where they go
};

struct Model {
    Matrix embedding, positions, head;  // positions: packed is null where there are none
    std::vector<Layer> layers;          // of one width, heads, kv, d and size of the feed-forward part
    Norm norm;                          // the last one
    double eps = 0, offset = 0, scale = 1, cap = 0;  // scale: of the embedding; cap: of logits, 0 for none
    bool centred = false;

    // made = rows of a matrix.
    static void rows_of(const Matrix& matrix, const int64_t* ids, int64_t count, float* made) {
        const int64_t width = matrix.width;
        if (matrix.format == FLOAT32) {
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(
                    made + i * width, matrix.packed + ids[i] * width * int64_t(sizeof(float)), size_t(width) * sizeof(float)
                );
        } else if (matrix.format == BFLOAT16) {
            const auto* from = reinterpret_cast<const Bfloat16*>(matrix.packed);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t k = 0; k < width; ++k) {
                    const uint32_t bits = uint32_t(from[ids[i] * width + k].bits) << 16;
                    std::memcpy(made + i * width + k, &bits, sizeof bits);
                }
        } else {
            with_format(int(matrix.format), [&](auto kind) {
                ::rows<decltype(kind)>(matrix.packed, width, ids, count, made);
                return int64_t(0);
            });
        }
    }

    void embed(const Pass& pass, float* made, float* more) const {
        const int64_t count = pass.batch * pass.n, size = count * embedding.width;
        rows_of(embedding, pass.tokens, count, made);
        if (scale != 1.0)
            for (int64_t i = 0; i < size; ++i) made[i] *= float(scale);
        if (!positions.packed) return;
        rows_of(positions, pass.position, count, more);
        for (int64_t i = 0; i < size; ++i) made[i] += more[i];
    }

    // A pass from ids to the last states [batch, n, width] and, unless null, logits [batch, n, vocab].
    void forward(const Pass& pass, float* states, float* logits, int threads) const {
        const int64_t count = pass.batch * pass.n;
        check(pass.tokens, count, embedding, "a token id has no row in the model's embedding");
        if (positions.packed) check(pass.position, count, positions, "the text is longer than the model's context");
        const Layer& first = layers.front();
        const int64_t width = first.width, wide = first.heads * first.d, kv = count * first.kv * first.d;
        const int64_t inner = first.down.width;
        float *x = numbers(count * (2 * width + wide) + 2 * kv + room_after(first, count));
        float *query = x + count * width, *hidden = query + count * wide, *k = hidden + count * width, *v = k + kv;
        float* context = v + kv;
        Room& rounded = room(count, std::max({width, wide, inner, head.width}));
        Attention attention = {};
        attention.query = query, attention.rows = pass.seen, attention.batch = pass.batch, attention.n = pass.n;
        attention.heads = first.heads, attention.kv = first.kv, attention.d = first.d;
        attention.slots = pass.slots, attention.keys = pass.keys;
        embed(pass, x, hidden);
#pragma omp parallel num_threads(threads)
        {
            for (size_t i = 0; i < layers.size(); ++i) {
                const Layer& layer = layers[i];
                const Pass::Kind& kind = pass.kinds[size_t(layer.kind)];
                const Places places = {pass.caches[2 * i], pass.caches[2 * i + 1], pass.row, pass.slot, pass.slots};
                Attention own = attention;
                own.key = places.keys, own.value = places.values;
                own.mask = kind.mask, own.mask_step = kind.mask_step;
                own.scale = float(layer.scaling), own.cap = float(layer.cap);
                before(layer, x, count, {kind.cosine, kind.sine, pass.position}, hidden, query, k, v, places, rounded);
                after(layer, own, x, count, context, x, rounded);
                for (const auto& [number, to] : pass.taken) {
                    if (number != int64_t(i)) continue;
#pragma omp for
                    for (int64_t row = 0; row < count; ++row)
                        std::memcpy(to + row * width, x + row * width, size_t(width) * sizeof(float));
                }
            }
#pragma omp for
            for (int64_t i = 0; i < count; ++i)
                normalise(
                    x + i * width, norm.weight, norm.bias, width, centred, float(eps), float(offset), states + i * width
                );
            if (logits) {
                head.times(states, count, nullptr, logits, rounded);
                if (cap > 0) {
#pragma omp for
                    for (int64_t i = 0; i < count * head.high; ++i)
                        logits[i] = float(cap) * std::tanh(logits[i] / float(cap));
                }
            }
        }
    }

  private:
    static void check(const int64_t* ids, int64_t count, const Matrix& matrix, const char* message) {
        for (int64_t i = 0; i < count; ++i)
            if (ids[i] < 0 || ids[i] >= matrix.high) throw std::out_of_range(message);
    }
};

}  // namespace
