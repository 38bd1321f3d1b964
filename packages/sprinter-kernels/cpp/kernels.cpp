// The functions of the library: products, attention, and decoder layers, one around its cache or several in one call.

#include "attention.h"
#include "floats.h"
#include "pack.h"
#include "products.h"

#include <initializer_list>
#include <new>
#include <utility>

#if defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

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

// What `run` returns, or -1 if memory is short.
template <class Run>
int64_t guarded(Run run) {
    try {
        return run();
    } catch (const std::bad_alloc&) {
        return -1;
    }
}

struct Matrix {
    int64_t format;
    const uint8_t* packed;
    int64_t high, width;
    const float* bias;
    int64_t run, step;  // its rows, and numbers of bias, come in runs of so many, which begin so many apart

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

// As whole.py fills it, eight bytes a field.
struct Layer {
    Matrix q, k, v, o, gate, up, down;  // gate: packed is null where there is none
    // second_norm: before the feed-forward part. query_norm and key_norm: null for none; biases, and after_attention and
    // after_mlp, of what is added to the layer's input, likewise.
    const float *norm, *norm_bias, *query_norm, *key_norm, *second_norm, *second_bias, *after_attention, *after_mlp;
    // turned: numbers of a head that its position rotates. activation: of the feed-forward part. centred: norms take the
    // mean off. parallel: the feed-forward part reads the layer's input.
    int64_t width, heads, kv, d, turned, activation, centred, parallel;
    double eps, offset;  // offset: what is added to the norms' weights

    void norm_one(const float* x, const float* weight, const float* bias, int64_t size, float* made) const {
        normalise(x, weight, bias, size, centred, float(eps), float(offset), made);
    }

    // Inside a parallel region.
    void norm_rows(const float* x, const float* weight, const float* bias, int64_t rows, float* made) const {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) norm_one(x + row * width, weight, bias, width, made + row * width);
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

    // Inside a parallel region. made = x + matrix times y, normalised before if there is a weight; more [rows, width] is
    // room, and made may be x.
    void add(
        const Matrix& matrix, const float* y, const float* weight, const float* x, int64_t rows, float* more,
        float* made, Room& room
    ) const {
        if (!weight) return matrix.times(y, rows, x, made, room);
        matrix.times(y, rows, nullptr, more, room);
        norm_rows(more, weight, nullptr, rows, more);
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

int64_t widest(const Layer& layer) {
    return std::max({layer.q.width, layer.o.width, layer.up.width, layer.down.width});
}

// Where the tokens of a forward pass go in a layer's cache: keys and values are [batch, kv, slots, d].
struct Places {
    float *keys, *values;
    const int64_t *row, *slot;  // of each token
    int64_t slots;
};

// Angles of positions, [..., turned]: of each token, or, with `position`, of all positions, of which a token has one.
struct Turns {
    const float *cosine, *sine;
    const int64_t* position;
};

// Inside a parallel region. See sprinter_before; hidden [rows, width] is room. Without places, nothing is written there.
void before(
    const Layer& layer, const float* x, int64_t rows, const Turns& turns, float* hidden, float* q, float* k, float* v,
    const Places* places, Room& room
) {
    const int64_t heads = layer.heads + layer.kv, d = layer.d, all = places ? heads + layer.kv : heads;
    layer.norm_rows(x, layer.norm, layer.norm_bias, rows, hidden);
    layer.times({{&layer.q, q}, {&layer.k, k}, {&layer.v, v}}, hidden, rows, room);
#pragma omp for
    for (int64_t at = 0; at < rows * all; ++at) {
        const int64_t row = at / all, h = at % all;
        const bool query = h < layer.heads, value = h >= heads;
        const int64_t own = query ? h : value ? h - heads : h - layer.heads;
        float* head = query ? q + (row * layer.heads + own) * d : (value ? v : k) + (row * layer.kv + own) * d;
        if (!value) {
            const float* weight = query ? layer.query_norm : layer.key_norm;
            if (weight) layer.norm_one(head, weight, nullptr, d, head);
            const int64_t turn = (turns.position ? turns.position[row] : row) * layer.turned;
            rotate(head, turns.cosine + turn, turns.sine + turn, layer.turned);
        }
        if (places && !query) {
            const int64_t to = ((places->row[row] * layer.kv + own) * places->slots + places->slot[row]) * d;
            std::memcpy((value ? places->values : places->keys) + to, head, size_t(d) * sizeof(float));
        }
    }
}

int64_t room_after(const Layer& layer, int64_t rows) {
    return rows * (layer.o.width + 2 * layer.width + 2 * layer.down.width);
}

// Inside a parallel region. See sprinter_after; context [room_after] is room, and made may be x.
void after(
    const Layer& layer, const Attention& attention, const float* x, int64_t rows, float* context, float* made, Room& room
) {
    const int64_t inner = layer.down.width;
    float *middle = context + rows * layer.o.width, *hidden = middle + rows * layer.width;
    float *gate = hidden + rows * layer.width, *up = gate + rows * inner;
    attend_all(attention, context);
    layer.add(layer.o, context, layer.after_attention, x, rows, hidden, middle, room);
    layer.norm_rows(layer.parallel ? x : middle, layer.second_norm, layer.second_bias, rows, hidden);
    if (layer.gate.packed) layer.times({{&layer.gate, gate}, {&layer.up, up}}, hidden, rows, room);
    else layer.up.times(hidden, rows, nullptr, gate, room);
    activate(gate, layer.gate.packed ? up : nullptr, rows * inner, layer.activation);
    layer.add(layer.down, gate, layer.after_mlp, middle, rows, hidden, made, room);
}

// Inside a parallel region. `count` layers of one shape, in place: see sprinter_layers. hidden [room_layers] is room.
void run_layers(
    const Layer* layers, int64_t count, const Attention& attention, float* const* caches, const int64_t* row,
    const int64_t* slot, int64_t slots, float* x, int64_t rows, const Turns& turns, float* hidden, Room& room
) {
    const int64_t size = rows * layers->kv * layers->d;
    float *k = hidden + rows * layers->width, *v = k + size, *context = v + size;
    for (int64_t i = 0; i < count; ++i) {
        const Places places = {caches[2 * i], caches[2 * i + 1], row, slot, slots};
        Attention seen = attention;
        seen.key = places.keys, seen.value = places.values;
        before(layers[i], x, rows, turns, hidden, const_cast<float*>(seen.query), k, v, &places, room);
        after(layers[i], seen, x, rows, context, x, room);
    }
}

int64_t room_layers(const Layer& layer, int64_t rows) {
    return rows * (layer.width + 2 * layer.kv * layer.d) + room_after(layer, rows);
}

// A model of layers of one shape, as straight.py fills it, eight bytes a field.
struct Model {
    Matrix embedding, head;  // head: packed is null if it is another
    const Layer* layers;
    int64_t count;
    const float* norm;  // the last one
    double eps, scale;  // scale: of the embedding
    double scaling, cap;  // of attention

    // Rows of the embedding.
    void embed(const int64_t* ids, int64_t count, float* made) const {
        const int64_t width = embedding.width;
        if (embedding.format == FLOAT32) {
            for (int64_t i = 0; i < count; ++i)
                std::memcpy(
                    made + i * width, embedding.packed + ids[i] * width * int64_t(sizeof(float)), size_t(width) * sizeof(float)
                );
        } else if (embedding.format == BFLOAT16) {
            const auto* from = reinterpret_cast<const Bfloat16*>(embedding.packed);
            for (int64_t i = 0; i < count; ++i)
                for (int64_t k = 0; k < width; ++k) {
                    const uint32_t bits = uint32_t(from[ids[i] * width + k].bits) << 16;
                    std::memcpy(made + i * width + k, &bits, sizeof bits);
                }
        } else {
            with_format(int(embedding.format), [&](auto kind) {
                ::rows<decltype(kind)>(embedding.packed, width, ids, count, made);
                return int64_t(0);
            });
        }
        if (scale != 1.0)
            for (int64_t i = 0; i < count * width; ++i) made[i] *= float(scale);
    }
};

}  // namespace

#pragma GCC visibility push(default)

extern "C" {

// Whether the processor has an instruction set, by its name in CMakeLists.txt.
int sprinter_has(const char* set) {
    const auto is = [=](const char* name) { return std::strcmp(set, name) == 0; };
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    if (is("avx2")) return avx2;
    if (is("avx512"))
        return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
#elif defined(__APPLE__)
    if (is("neon")) return 1;  // all of Apple's own processors
#elif defined(__linux__) && defined(__aarch64__)
    if (is("neon")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return is("plain");
}

int64_t sprinter_bytes(int format, int64_t high, int64_t width) {
    return with_format(format, [=](auto kind) {
        return (high + CHANNELS - 1) / CHANNELS * decltype(kind)::block(width);
    });
}

// fine, fine_minimum: null where F is not nested.
int64_t sprinter_pack(
    int format, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum, const uint8_t* fine,
    const uint8_t* fine_minimum, int64_t high, int64_t width, uint8_t* packed, int threads
) {
    return with_format(format, [=](auto kind) {
        using F = decltype(kind);
        using Own = Block<F>;
        pack<F>(high, width, packed, threads, [=](int64_t row, int64_t b, Own& made) {
            const int64_t at = row * (width / Own::CODES) + b;
            for (int i = 0; i < Own::GROUPS; ++i) made.groups[i].take(codes + at * Own::CODES + i * GROUP);
            made.scale = scale[at];
            if (F::MINIMUM) made.minimum = minimum[at];
            if (F::NESTED) {
                std::memcpy(made.fine, fine + at * sizeof made.fine, sizeof made.fine);
                if (F::MINIMUM) std::memcpy(made.fine_minimum, fine_minimum + at * Own::GROUPS, Own::GROUPS);
            }
        });
        return int64_t(0);
    });
}

// The same from the blocks of a GGUF file; row i is its row order[i].
int64_t sprinter_pack_stored(
    int format, const uint8_t* stored, const int64_t* order, int64_t high, int64_t width, uint8_t* packed, int threads
) {
    return with_format(format, [=](auto kind) {
        using F = decltype(kind);
        const int64_t blocks = width / Block<F>::CODES;
        pack<F>(high, width, packed, threads, [=](int64_t row, int64_t b, Block<F>& made) {
            Stored<F>::take(stored + (order[row] * blocks + b) * Stored<F>::BYTES, made);
        });
        return int64_t(0);
    });
}

int64_t sprinter_product(
    int format, const uint8_t* packed, int64_t high, int64_t width, const float* x, int64_t rows, const float* bias,
    float* y, int threads
) {
    return guarded([=] {
        const Matrix matrix = {format, packed, high, width, bias, high, high};
        Room& own = room(rows, width);
#pragma omp parallel num_threads(threads)
        matrix.times(x, rows, nullptr, y, own);
        return int64_t(0);
    });
}

int64_t sprinter_rows(
    int format, const uint8_t* packed, int64_t width, const int64_t* ids, int64_t count, float* made
) {
    return with_format(format, [=](auto kind) {
        rows<decltype(kind)>(packed, width, ids, count, made);
        return int64_t(0);
    });
}

int64_t sprinter_attention(const Attention* attention, float* made, int threads) {
#pragma omp parallel num_threads(threads)
    attend_all(*attention, made);
    return 0;
}

// A layer up to its cache: x [rows, width] -> q [rows, heads, d], k and v [rows, kv, d]. cosine and sine [rows, turned].
int64_t sprinter_before(
    const Layer* layer, const float* x, int64_t rows, const float* cosine, const float* sine, float* q, float* k,
    float* v, int threads
) {
    return guarded([=] {
        float* hidden = numbers(rows * layer->width);
        Room& own = room(rows, widest(*layer));
#pragma omp parallel num_threads(threads)
        before(*layer, x, rows, {cosine, sine, nullptr}, hidden, q, k, v, nullptr, own);
        return int64_t(0);
    });
}

// The rest of it: attention over the cache, output, and the feed-forward part. made [rows, width].
int64_t sprinter_after(
    const Layer* layer, const Attention* attention, const float* x, int64_t rows, float* made, int threads
) {
    return guarded([=] {
        float* context = numbers(room_after(*layer, rows));
        Room& own = room(rows, widest(*layer));
#pragma omp parallel num_threads(threads)
        after(*layer, *attention, x, rows, context, made, own);
        return int64_t(0);
    });
}

// `count` layers of one shape, in place: x [rows, width]. caches: keys and values of each, [batch, kv, slots, d]; token i
// goes to slot[i] of row[i]. attention: of each, but for its key and value; its query is room, [rows, heads, d].
int64_t sprinter_layers(
    const Layer* layers, int64_t count, const Attention* attention, float* const* caches, const int64_t* row,
    const int64_t* slot, int64_t slots, float* x, int64_t rows, const float* cosine, const float* sine, int threads
) {
    return guarded([=] {
        float* hidden = numbers(room_layers(*layers, rows));
        Room& own = room(rows, widest(*layers));
#pragma omp parallel num_threads(threads)
        run_layers(layers, count, *attention, caches, row, slot, slots, x, rows, {cosine, sine, nullptr}, hidden, own);
        return int64_t(0);
    });
}

// made [rows, width], which may be x.
int64_t sprinter_norm(const float* x, const float* weight, int64_t rows, int64_t width, double eps, float* made) {
    for (int64_t row = 0; row < rows; ++row)
        normalise(x + row * width, weight, nullptr, width, false, float(eps), 0.0f, made + row * width);
    return 0;
}

// A pass over tokens [batch, n] of the whole model, from ids to its last states [batch, n, width] and, unless null, logits
// [batch, n, vocab]. cosine and sine: of all positions. caches, slots, as in sprinter_layers. seen: for each of the batch,
// where its keys and values are, or null; mask and its strides as in Attention, with `keys` keys. position, row and slot:
// of each token; null: those of rows 0, 1, ... that all go on from `start`. Returns -2 if an id has no row.
int64_t sprinter_pass(
    const Model* model, const int64_t* tokens, int64_t batch, int64_t n, int64_t start, const int64_t* position,
    const int64_t* row, const int64_t* slot, const float* cosine, const float* sine, float* const* caches, int64_t slots,
    int64_t keys, const uint8_t* mask, int64_t mask_batch, int64_t mask_token, const int64_t* seen, float* states,
    float* logits, int threads
) {
    const int64_t rows = batch * n;
    for (int64_t i = 0; i < rows; ++i)
        if (tokens[i] < 0 || tokens[i] >= model->embedding.high) return -2;
    return guarded([=] {
        const Layer& layer = *model->layers;
        const int64_t wide = layer.heads * layer.d, step = layer.kv * slots * layer.d;
        static thread_local std::vector<int64_t> places;
        std::vector<int64_t>& own = places;
        if (!row) {
            own.resize(size_t(2 * rows));
            for (int64_t i = 0; i < rows; ++i) own[i] = i / n, own[rows + i] = start + i % n;
        }
        const int64_t *rows_of = row ? row : own.data(), *slots_of = row ? slot : own.data() + rows;
        const Turns turns = {cosine, sine, position ? position : slots_of};
        float *x = numbers(rows * (layer.width + wide) + room_layers(layer, rows)), *query = x + rows * layer.width;
        float* hidden = query + rows * wide;
        Room& rounded = room(rows, std::max(widest(layer), model->head.width));
        const int64_t query_step[3] = {n * wide, layer.d, wide}, key_step[3] = {step, slots * layer.d, layer.d};
        const int64_t mask_step[2] = {mask_batch, mask_token};
        Attention attention = {};
        attention.query = query, attention.query_step = query_step;
        attention.key_step = attention.value_step = key_step;
        attention.mask = mask, attention.mask_step = mask_step, attention.rows = seen;
        attention.batch = batch, attention.heads = layer.heads, attention.kv = layer.kv, attention.n = n;
        attention.keys = keys, attention.d = attention.d_v = layer.d;
        attention.scale = float(model->scaling), attention.cap = float(model->cap);
        model->embed(tokens, rows, x);
#pragma omp parallel num_threads(threads)
        {
            run_layers(model->layers, model->count, attention, caches, rows_of, slots_of, slots, x, rows, turns, hidden, rounded);
#pragma omp for
            for (int64_t i = 0; i < rows; ++i)
                normalise(
                    x + i * layer.width, model->norm, nullptr, layer.width, false, float(model->eps), 0.0f,
                    states + i * layer.width
                );
            if (logits) model->head.times(states, rows, nullptr, logits, rounded);
        }
        return int64_t(0);
    });
}

}

#pragma GCC visibility pop
